// silu(gate x) up x of the chosen experts of each row. A simdgroup computes OUTS outputs of one of
// them, a lane every 32nd pair of packs of 8 weights.
//
// Constants: D (inputs), F (outputs; both are multiples of 32), TOP_K, BITS (of a weight), GROUP
// (inputs that share a scale), T. Shapes are those of experts.rs. Results are rounded where the
// separate operations round.
//
// PACKS is that of MLX's product of one row. On an H200, one pack took twice the time of two.
constexpr int OUTS = 2, SIMDGROUPS = 2, PACK = 8, PACKS = 2;
const int lane = int(thread_index_in_simdgroup), pair = int(threadgroup_position_in_grid.z);
const int part = int(threadgroup_position_in_grid.y) * SIMDGROUPS;
const int first = (part + int(simdgroup_index_in_threadgroup)) * OUTS;
const int row = pair / TOP_K, expert = int(chosen[pair]);
float gates[OUTS], ups[OUTS];
for (int o = 0; o < OUTS; o++) gates[o] = ups[o] = 0;
for (int at = lane * PACKS * PACK; at < D; at += 32 * PACKS * PACK) {
  float inputs[PACKS][PACK], totals[PACKS];
  for (int p = 0; p < PACKS; p++) totals[p] = read_pack(x + row * D + at + p * PACK, inputs[p]);
  for (int o = 0; o < OUTS; o++) {
    for (int p = 0; p < PACKS; p++) {
      const int own = expert * F + first + o, pack = own * (D / PACK) + at / PACK + p;
      const int group = own * (D / GROUP) + (at + p * PACK) / GROUP;
      gates[o] += product<BITS>(gate, gate_scales, gate_biases, pack, group, inputs[p], totals[p]);
      ups[o] += product<BITS>(up, up_scales, up_biases, pack, group, inputs[p], totals[p]);
    }
  }
}
for (int o = 0; o < OUTS; o++) {
  const float gated = ROUNDED(simd_sum(gates[o]));
  const float upped = ROUNDED(simd_sum(ups[o]));
  if (lane == 0) {
    const float factor = ROUNDED(1 / (1 + exp(-gated)));
    mid[pair * F + first + o] = static_cast<T>(ROUNDED(gated * factor) * upped);
  }
}
