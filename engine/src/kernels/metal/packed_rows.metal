// A few rows times a matrix of 4-bit integers with a scale and a bias for each group: the weights are read once for all rows.
// A simdgroup computes OUTS outputs of each row, a lane every 32nd word of 8 weights. The sum of a row does not depend on the
// others.
//
// Constants: N (outputs), K (inputs), ROWS, GROUP (inputs that share a scale), T. Shapes are those of packed_rows.rs.
constexpr int OUTS = 4, SIMDGROUPS = 2, WORD = 8;
const int lane = int(thread_index_in_simdgroup);
const int first = (int(threadgroup_position_in_grid.y) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * OUTS;
float sums[OUTS][ROWS];
for (int o = 0; o < OUTS; o++) {
  for (int r = 0; r < ROWS; r++) sums[o][r] = 0;
}
for (int at = lane * WORD; at < K; at += 32 * WORD) {
  float weights[OUTS][WORD];
  for (int o = 0; o < OUTS; o++) {
    // Of outputs past the last one, which are not written.
    const int row = min(first + o, N - 1);
    const uint word = words[row * (K / WORD) + at / WORD];
    const float scale = static_cast<float>(scales[row * (K / GROUP) + at / GROUP]);
    const float bias = static_cast<float>(biases[row * (K / GROUP) + at / GROUP]);
    for (int j = 0; j < WORD; j++) weights[o][j] = fma(float((word >> (4 * j)) & 15u), scale, bias);
  }
  for (int r = 0; r < ROWS; r++) {
    for (int j = 0; j < WORD; j++) {
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
