// The experts of a row and their shares: the TOP_K largest of a softmax. A threadgroup has one row.
// Its first simdgroup chooses; a second one computes the gate of the shared expert, if there is
// one.
//
// Constants: E (experts), TOP_K, NORMED (the shares are divided by their sum), SCALE (bits of the
// factor of shares), D, T. GATE_PRODUCT(at, inputs, total) is the product of the gate's weights
// from `at` on with 8 inputs, whose sum is `total`. Shapes are those of experts.rs. Results are
// rounded where the separate operations round.
constexpr int OWN = (E + 31) / 32;
const int row = int(threadgroup_position_in_grid.y), lane = int(thread_index_in_simdgroup);
if (simdgroup_index_in_threadgroup > 0) {
  float dot = 0;
  for (int at = lane * 8; at < D; at += 32 * 8) {
    float inputs[8];
    const float total = read_pack(x + row * D + at, inputs);
    dot += GATE_PRODUCT(at, inputs, total);
  }
  dot = ROUNDED(simd_sum(dot));
  if (lane == 0) shared_gate[row] = static_cast<T>(1 / (1 + exp(-dot)));
} else {
  float ranks[OWN], highest = -INFINITY, sum = 0;
  for (int i = 0; i < OWN; i++) {
    ranks[i] = i * 32 + lane < E ? static_cast<float>(scores[row * E + i * 32 + lane]) : -INFINITY;
    highest = fmax(highest, ranks[i]);
  }
  highest = simd_max(highest);
  for (int i = 0; i < OWN; i++) {
    ranks[i] = exp(ranks[i] - highest);
    sum += ranks[i];
  }
  sum = simd_sum(sum);
  for (int i = 0; i < OWN; i++) {
    ranks[i] = i * 32 + lane < E ? ROUNDED(ranks[i] / sum) : -1;
  }
  float share = 0;
  int own_expert = 0;
  for (int k = 0; k < TOP_K; k++) {
    // The largest probability, of the first expert that has it.
    float best = -1;
    int expert = 0;
    for (int i = 0; i < OWN; i++) {
      if (ranks[i] > best) {
        best = ranks[i];
        expert = i * 32 + lane;
      }
    }
    const float most = simd_max(best);
    expert = E - simd_max(best == most ? E - expert : 0);
    for (int i = 0; i < OWN; i++) {
      if (i * 32 + lane == expert) ranks[i] = -1;
    }
    if (lane == k) {
      // If no score is a number, the shares are none.
      share = most < 0 ? sum : most;
      own_expert = expert;
    }
  }
  const float all = ROUNDED(simd_sum(share));
  if (lane < TOP_K) {
    if (NORMED) share = ROUNDED(share / all);
    chosen[row * TOP_K + lane] = uint(own_expert);
    shares[row * TOP_K + lane] = static_cast<T>(share * as_type<float>(SCALE));
  }
}
