// The experts of a row and their shares: the TOP_K largest of a softmax. One block a row. With a shared expert that has
// a gate, also the gate's sigmoid.
//
// Constants: E (experts), TOP_K, NORMED (the shares are divided by their sum), SCALE (bits of the factor of shares), D,
// EPS (bits of the norm's epsilon), GATE (0: none, 1: `gate` is dense, 4 or 8: bits of its groups of 64), THREADS,
// T (bfloat16). Results are rounded where the separate operations round.
constexpr int WARPS = THREADS / 32, OWN = (E + 31) / 32;
__shared__ float squares[WARPS], dots[WARPS];
wait_for_inputs();
const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
auto rounded = [](float x) { return float(T(x)); };
auto total = [](float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
};
if (GATE > 0) {
  const T* const own = x + size_t(row) * D;
  float sum = 0;
  for (int i = threadIdx.x; i < D; i += THREADS) sum += float(own[i]) * float(own[i]);
  sum = total(sum);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < WARPS; w++) sum += squares[w];
  const float factor = rsqrtf(sum / D + __int_as_float(EPS));
  float dot = 0;
  for (int i = threadIdx.x; i < D; i += THREADS) {
    float weight;
    if (GATE == 1) {
      weight = float(reinterpret_cast<const T*>(gate)[i]);
    } else {
      constexpr int BITS = GATE == 1 || GATE == 0 ? 4 : GATE, PER = 32 / BITS;
      const unsigned q = reinterpret_cast<const unsigned*>(gate)[i / PER] >> (i % PER * BITS) & ((1 << BITS) - 1);
      weight = q * float(gate_scales[i / 64]) + float(gate_biases[i / 64]);
    }
    dot += rounded(rounded(float(own[i]) * factor) * float(norm[i])) * weight;
  }
  dot = total(dot);
  if (lane == 0) dots[warp] = dot;
  __syncthreads();
  if (threadIdx.x == 0) {
    dot = 0;
    for (int w = 0; w < WARPS; w++) dot += dots[w];
    shared_gate[row] = T(1 / (1 + expf(-rounded(dot))));
  }
}
if (warp > 0) return;
const float none = __int_as_float(0xff800000);  // minus infinity
float scores_of[OWN], highest = none, sum = 0;
for (int i = 0; i < OWN; i++) {
  const int expert = i * 32 + lane;
  scores_of[i] = expert < E ? float(scores[size_t(row) * E + expert]) : none;
  highest = fmaxf(highest, scores_of[i]);
}
for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
for (int i = 0; i < OWN; i++) sum += scores_of[i] = expf(scores_of[i] - highest);
sum = total(sum);
for (int i = 0; i < OWN; i++) scores_of[i] = i * 32 + lane < E ? rounded(scores_of[i] / sum) : -1;
float share = 0;
int own_expert = 0;
for (int k = 0; k < TOP_K; k++) {
  // The largest probability, of the first expert that has it.
  float best = -1;
  int expert = 0;
  for (int i = 0; i < OWN; i++) {
    if (scores_of[i] > best) best = scores_of[i], expert = i * 32 + lane;
  }
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, best, step);
    const int other_expert = __shfl_xor_sync(~0u, expert, step);
    if (other > best || (other == best && other_expert < expert)) best = other, expert = other_expert;
  }
  for (int i = 0; i < OWN; i++) {
    if (i * 32 + lane == expert) scores_of[i] = -1;
  }
  if (lane == k) share = best, own_expert = expert;
}
const float all = rounded(total(share));
if (lane < TOP_K) {
  if (NORMED) share = rounded(share / all);
  const float scale = __int_as_float(SCALE);
  shares[row * TOP_K + lane] = T(scale == 1 ? share : rounded(share) * scale);
  chosen[row * TOP_K + lane] = own_expert;
}
