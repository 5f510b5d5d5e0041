// From the projections of queries, keys and values to attention: norms of heads, rotation by position, and the write
// of keys and values to the caches of all spans, in place. A block computes one head of one row.
//
// Constants: HQ, HKV, D, GATED (each query is followed by its gate), JOINED (q, k and v are the same array, which has
// them side by side), NORMED, EPS (bits of the norms' epsilon), DIMS (rotated dimensions of a head, 0 for none), STRETCHED
// (`wavelengths` are given), BASE (bits of the logarithm of the base to base 2), SCALE (bits of the factor of positions),
// T. Results are rounded where the separate operations round.
constexpr int Q_HEAD = GATED ? 2 * D : D, HALF = DIMS / 2, WARPS = D / 32;
constexpr int ALL = HQ * Q_HEAD + 2 * HKV * D;
constexpr int Q_ROW = JOINED ? ALL : HQ * Q_HEAD, KV_ROW = JOINED ? ALL : HKV * D;
__shared__ float elements[D], squares[WARPS];

wait_for_inputs();
const int slot = blockIdx.x, row = blockIdx.y, i = threadIdx.x;
// Of the row.
int position = 0, place = 0, capacity = 0;
const T* buffer = nullptr;
#define FIND(i) \
  if (row >= first##i && row < first##i + rows##i) { \
    position = position##i + row - first##i, place = place##i + row - first##i, capacity = capacity##i, buffer = kv##i; \
  }
EACH_SPAN(FIND)
const bool is_query = slot < HQ, is_value = slot >= HQ + HKV;
const int head = is_query ? slot : (slot - HQ) % HKV;
const T* source;
if (is_query) {
  source = q + size_t(row) * Q_ROW + head * Q_HEAD;
} else if (is_value) {
  source = v + (JOINED ? HQ * Q_HEAD + HKV * D : 0) + size_t(row) * KV_ROW + head * D;
} else {
  source = k + (JOINED ? HQ * Q_HEAD : 0) + size_t(row) * KV_ROW + head * D;
}
T y = source[i];
if (NORMED && !is_value) {
  const float x = float(y);
  float sum = x * x;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (i % 32 == 0) squares[i / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < WARPS; w++) sum += squares[w];
  const float factor = rsqrtf(sum / D + __int_as_float(EPS));
  y = T(float(T(x * factor)) * float((is_query ? q_norm : k_norm)[i]));
}
if (DIMS > 0 && !is_value) {
  elements[i] = float(y);
  __syncthreads();
  if (i < DIMS) {
    const int pair = i % (HALF > 0 ? HALF : 1);
    const float frequency =
        STRETCHED ? 1 / float(wavelengths[pair]) : exp2f(-(float(pair) / HALF) * __int_as_float(BASE));
    const float angle = float(position) * __int_as_float(SCALE) * frequency;
    const float first = elements[pair], second = elements[pair + HALF];
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    y = T(i < HALF ? first * cosine - second * sine : first * sine + second * cosine);
  }
}
if (is_query) {
  out[(size_t(row) * HQ + head) * D + i] = y;
} else {
  const size_t to = (size_t(is_value ? HKV + head : head) * capacity + place) * D + i;
  const_cast<T*>(buffer)[to] = y;
}
