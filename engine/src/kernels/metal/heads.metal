// From the projections of queries, keys and values to attention: norms of heads and rotation by position. Keys and values
// come out as a cache appends them, heads first. A threadgroup has one head of one row, a thread one dimension of it.
//
// Constants: HQ, HKV, D, GATED (each query is followed by its gate), JOINED (x_q has k and v beside it), NORMED, EPS (bits of
// the norms' epsilon), DIMS (rotated dimensions of a head, 0 for none), SCALE (bits of the factor of positions), T. `numbers`
// has the number of rows, and the position of each. Results are rounded where the separate operations round.
constexpr int Q_HEAD = GATED ? 2 * D : D, HALF = DIMS > 0 ? DIMS / 2 : 1, SIMDGROUPS = D / 32;
constexpr int ALL = HQ * Q_HEAD + 2 * HKV * D, Q_ROW = JOINED ? ALL : HQ * Q_HEAD, KV_ROW = JOINED ? ALL : HKV * D;
SHARED(float, elements, D);
SHARED(float, squares, SIMDGROUPS);

const int slot = int(threadgroup_position_in_grid.y), row = int(threadgroup_position_in_grid.z);
const int i = int(thread_position_in_threadgroup.x), rows = numbers[0], position = numbers[1 + row];
const bool is_query = slot < HQ, is_value = slot >= HQ + HKV;
const int head = is_query ? slot : (slot - HQ) % HKV;
const int k_at = JOINED ? HQ * Q_HEAD : 0, v_at = JOINED ? HQ * Q_HEAD + HKV * D : 0;

float y;
if (is_query) {
  const int at = row * Q_ROW + head * Q_HEAD + i;
  y = static_cast<float>(x_q[at]);
  if (GATED) gates[(row * HQ + head) * D + i] = static_cast<T>(x_q[at + D * GATED]);
} else if (is_value) {
  y = static_cast<float>(x_v[v_at + row * KV_ROW + head * D + i]);
} else {
  y = static_cast<float>(x_k[k_at + row * KV_ROW + head * D + i]);
}
// These conditions are the same for all threads of the threadgroup.
if (NORMED && !is_value) {
  const float part = simd_sum(y * y);
  if (thread_index_in_simdgroup == 0) squares[simdgroup_index_in_threadgroup] = part;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (int s = 0; s < SIMDGROUPS; s++) sum += squares[s];
  const float factor = rsqrt(sum / D + as_type<float>(EPS));
  const float weight = is_query ? static_cast<float>(q_norm[i]) : static_cast<float>(k_norm[i]);
  y = static_cast<float>(static_cast<T>(static_cast<float>(static_cast<T>(y * factor)) * weight));
}
if (DIMS > 0 && !is_value) {
  elements[i] = y;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < DIMS) {
    const int pair = i % HALF;
    const float angle = float(position) * as_type<float>(SCALE) * static_cast<float>(frequencies[pair]);
    const float first = elements[pair], second = elements[pair + HALF];
    const float sine = sin(angle), cosine = cos(angle);
    y = i < HALF ? first * cosine - second * sine : first * sine + second * cosine;
  }
}
if (is_query) {
  rotated[(row * HQ + head) * D + i] = static_cast<T>(y);
} else {
  kv[((is_value ? HKV + head : head) * rows + row) * D + i] = static_cast<T>(y);
}
