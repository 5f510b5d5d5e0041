// The residual, the outputs of the chosen experts times their shares, and that of the shared expert
// times its gate. A threadgroup computes OUTS outputs of a row, a simdgroup those of one expert,
// and a lane every 32nd pack of 8 weights.
//
// Constants: D (outputs), F (inputs; both are multiples of 32), TOP_K, BITS (of a weight), GROUP
// (inputs that share a scale), T. SHARED_EXPERT(i) is element i of the shared expert's output times
// its gate. Shapes are those of experts.rs. Results are rounded where the separate operations
// round.
constexpr int OUTS = 4, PACK = 8;
SHARED(float, parts, TOP_K * OUTS);
const int lane = int(thread_index_in_simdgroup), k = int(simdgroup_index_in_threadgroup);
const int own = int(thread_position_in_threadgroup.x), row = int(threadgroup_position_in_grid.z);
const int first = int(threadgroup_position_in_grid.y) * OUTS;
const int pair = row * TOP_K + k, expert = int(chosen[pair]);
float sums[OUTS];
for (int o = 0; o < OUTS; o++) sums[o] = 0;
for (int at = lane * PACK; at < F; at += 32 * PACK) {
  float inputs[PACK];
  const float total = read_pack(mid + pair * F + at, inputs);
  for (int o = 0; o < OUTS; o++) {
    const int output = expert * D + first + o;
    const int pack = output * (F / PACK) + at / PACK, group = output * (F / GROUP) + at / GROUP;
    sums[o] += product<BITS>(down, down_scales, down_biases, pack, group, inputs, total);
  }
}
for (int o = 0; o < OUTS; o++) {
  const float sum = simd_sum(sums[o]);
  if (lane == 0) parts[k * OUTS + o] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (own < OUTS) {
  const int i = row * D + first + own;
  float y = 0;
  for (int e = 0; e < TOP_K; e++) {
    const float part = parts[e * OUTS + own];
    y += ROUNDED(ROUNDED(part) * static_cast<float>(shares[row * TOP_K + e]));
  }
  y = ROUNDED(y);
  y = ROUNDED(y + SHARED_EXPERT(i));
  out[i] = static_cast<T>(static_cast<float>(residual[i]) + y);
}
