// residual + the sum of the chosen experts' outputs times their shares, and of the shared expert's times its gate. A warp
// computes OUTPUTS neighbours of the D outputs of a row, for all experts.
//
// Constants: D, F (inputs), TOP_K (at most 8), SHARED (0: none, 1: added as it is, 2: times `shared_gate`), WARPS,
// T (bfloat16). Results are rounded where the separate operations round.
constexpr int PASSES = (F + WARP_WEIGHTS - 1) / WARP_WEIGHTS, OUTPUTS = 2, MOST = 8;
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
const int row = blockIdx.y, first = (blockIdx.x * WARPS + warp) * OUTPUTS;
auto rounded = [](float x) { return float(T(x)); };
wait_for_inputs();
if (first >= D) return;
float sums[MOST * OUTPUTS] = {};
#pragma unroll
for (int pass = 0; pass < PASSES; pass++) {
  const int at = pass * WARP_WEIGHTS + lane * LANE_WEIGHTS;
#pragma unroll
  for (int k = 0; k < TOP_K; k++) {
    const int pair = row * TOP_K + k;
    const size_t expert_row = size_t(chosen[pair]) * D + first;
    Weights weights[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i++) {
      weights[i] = weights_of(down, scales, biases, expert_row + i, F, at, at < F && first + i < D);
    }
    float own[LANE_WEIGHTS], total = 0;
    read_lane(own, mid + size_t(pair) * F, at, at < F);
    for (int i = 0; i < LANE_WEIGHTS; i++) total += own[i];
    for (int i = 0; i < OUTPUTS; i++) sums[k * OUTPUTS + i] += product(weights[i], own, total);
  }
}
// Two lanes have the sum of an expert and an output.
float y = rounded(lane_sums(sums, lane));
const int k = lane / 4, output = first + lane / 2 % OUTPUTS;
y = k < TOP_K ? rounded(y * float(shares[row * TOP_K + k])) : 0;
for (int step = 4; step < 32; step *= 2) y += __shfl_xor_sync(~0u, y, step);
if (lane < 4 && lane % 2 == 0 && output < D) {
  const size_t to = size_t(row) * D + output;
  y = rounded(y);
  if (SHARED > 0) {
    const float other = float(shared[to]);
    y = rounded(y + (SHARED == 2 ? rounded(other * float(shared_gate[row])) : other));
  }
  out[to] = T(float(residual[to]) + y);
}
