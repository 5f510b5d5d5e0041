// silu(gate x) up x of the chosen experts of each row, for matrices of 4 bits in groups of 64. A warp computes OUTPUTS
// neighbours of the F outputs of an expert; a lane holds the inputs that it multiplies.
//
// Constants: D (inputs), F, TOP_K, EPS (bits of the norm's epsilon), WARPS, T (bfloat16). Results are rounded where the
// separate operations round.
constexpr int PASSES = (D + WARP_WEIGHTS - 1) / WARP_WEIGHTS, OUTPUTS = 4;
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
const int pair = blockIdx.y, row = pair / TOP_K, first = (blockIdx.x * WARPS + warp) * OUTPUTS;
auto at = [&](int pass) { return pass * WARP_WEIGHTS + lane * LANE_WEIGHTS; };
auto rounded = [](float x) { return float(T(x)); };
wait_for_inputs();
if (first >= F) return;
const size_t expert_row = size_t(chosen[pair]) * F + first;
Weights weights[OUTPUTS][2];
auto load = [&](int pass) {
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    const bool there = at(pass) < D && first + i < F;
    weights[i][0] = weights_of(gate, gate_scales, gate_biases, expert_row + i, D, at(pass), there);
    weights[i][1] = weights_of(up, up_scales, up_biases, expert_row + i, D, at(pass), there);
  }
};
load(0);
float own[PASSES][LANE_WEIGHTS], squares = 0;
#pragma unroll
for (int pass = 0; pass < PASSES; pass++) {
  read_lane(own[pass], x + size_t(row) * D, at(pass), at(pass) < D);
  for (int i = 0; i < LANE_WEIGHTS; i++) squares += own[pass][i] * own[pass][i];
}
for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
const float factor = rsqrtf(squares / D + __int_as_float(EPS));
float sums[OUTPUTS * 2] = {};
#pragma unroll
for (int pass = 0; pass < PASSES; pass++) {
  float norms[LANE_WEIGHTS], total = 0;
  read_lane(norms, norm, at(pass), at(pass) < D);
  for (int i = 0; i < LANE_WEIGHTS; i++) {
    own[pass][i] = rounded(rounded(own[pass][i] * factor) * norms[i]);
    total += own[pass][i];
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    for (int side = 0; side < 2; side++) sums[2 * i + side] += product(weights[i][side], own[pass], total);
  }
  if (pass + 1 < PASSES) load(pass + 1);
}
// Four lanes have a sum each; those of a gate and its up are neighbours.
const float sum = rounded(lane_sums(sums, lane)), up_sum = __shfl_xor_sync(~0u, sum, 4);
const int output = first + lane / 8;
if (lane % 8 == 0 && output < F) {
  out[size_t(pair) * F + output] = T(rounded(sum * rounded(1 / (1 + expf(-sum)))) * up_sum);
}
