// A few rows times a packed matrix: the weights are read once for all rows. A simdgroup computes OUTS outputs of each row, a
// lane every 32nd pack of 8 weights. The sum of a row does not depend on the others.
//
// Constants: N (outputs), K (inputs), ROWS, BITS (of a weight), GROUP (inputs that share a scale), T. Shapes are those of
// packed_rows.rs.
constexpr int OUTS = 4, SIMDGROUPS = 2, PACK = 8;
const int lane = int(thread_index_in_simdgroup);
const int first = (int(threadgroup_position_in_grid.y) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * OUTS;
float sums[OUTS][ROWS];
for (int o = 0; o < OUTS; o++) {
  for (int r = 0; r < ROWS; r++) sums[o][r] = 0;
}
for (int at = lane * PACK; at < K; at += 32 * PACK) {
  float weights[OUTS][PACK];
  for (int o = 0; o < OUTS; o++) {
    // Outputs past the last one are computed from its weights, and not written.
    const int row = min(first + o, N - 1);
    const float scale = static_cast<float>(scales[row * (K / GROUP) + at / GROUP]);
    const float bias = static_cast<float>(biases[row * (K / GROUP) + at / GROUP]);
    unpack<BITS>(words, row * (K / PACK) + at / PACK, weights[o]);
    for (int j = 0; j < PACK; j++) weights[o][j] = fma(weights[o][j], scale, bias);
  }
  for (int r = 0; r < ROWS; r++) {
    for (int j = 0; j < PACK; j++) {
      const float input = static_cast<float>(x[r * K + at + j]);
      for (int o = 0; o < OUTS; o++) sums[o][r] = fma(weights[o][j], input, sums[o][r]);
    }
  }
}
for (int o = 0; o < OUTS; o++) {
  for (int r = 0; r < ROWS; r++) {
    const float sum = simd_sum(sums[o][r]);
    if (lane == 0 && first + o < N) y[r * N + first + o] = static_cast<T>(sum);
  }
}
