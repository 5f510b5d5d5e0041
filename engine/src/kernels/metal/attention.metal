// Attention of a few rows of each span over the span's own keys, part by part. A threadgroup has up
// to BLOCK queries of one key head and one part of SPLIT keys; attention_join.metal joins the
// parts. A part is always the same keys of a sequence, so that a row's result does not depend on
// the other spans of the launch.
//
// Constants: HQ, HKV, D, SPLIT, SCALE (bits of the factor of scores), T. BUFFER(i) is the i-th
// buffer of keys and values. `numbers` has the number of spans and SPAN numbers for each: its first
// row, its rows, its keys, the first of its partial results, the first of its parts in the grid,
// its shared keys, buffer and capacity of its own keys, and those of its shared keys. Shapes are
// those of attention.rs.
constexpr int SIMDGROUPS = D / 32, PER = D / 32, BLOCK = 4, GROUP = HQ / HKV, SPAN = 10;
// Less than every score. Infinities are avoided: a compiler may assume that there are none.
constexpr float LOWEST = -3e38f;
// Scores and then weights of the part's keys, BLOCK for each.
SHARED(float, weights, SPLIT * BLOCK);

const int x = int(threadgroup_position_in_grid.x);
const int y = int(threadgroup_position_in_grid.y);
const int i = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
int at = 1;
for (int s = 1; s < numbers[0] && x >= numbers[1 + SPAN * s + 4]; s++) at = 1 + SPAN * s;
const int first_row = numbers[at], rows = numbers[at + 1], keys = numbers[at + 2];
const int part = x - numbers[at + 4], start = part * SPLIT, count = min(SPLIT, keys - start);
const int head = y % HKV, first = y / HKV * BLOCK, own = min(BLOCK, GROUP * rows - first);
// The same for all threads of the threadgroup.
if (own <= 0) return;
// A part lies in one buffer: there are whole parts of shared keys.
const int shared_keys = numbers[at + 5];
const bool is_shared = start < shared_keys;
const int buffer = is_shared ? numbers[at + 8] : numbers[at + 6];
const int capacity = is_shared ? numbers[at + 9] : numbers[at + 7];
const int place = start - (is_shared ? 0 : shared_keys);
const device T* k = BUFFER(buffer) + (size_t(head) * capacity + place) * D;
const device T* v = k + size_t(HKV) * capacity * D;

// The head and the row of the threadgroup's query b, and the place of its partial result.
#define QUERY_HEAD(b) (head * GROUP + (first + (b)) % GROUP)
#define ROW(b) ((first + (b)) / GROUP)
#define RESULT(b) ((results + ROW(b) * all_parts + part) * HQ + QUERY_HEAD(b))
const int results = numbers[at + 3], all_parts = (keys + SPLIT - 1) / SPLIT;

// A lane has PER neighbours of each query and key.
float query[BLOCK][PER];
for (int b = 0; b < BLOCK; b++) {
  for (int p = 0; p < PER; p++) {
    query[b][p] = 0;
    if (b < own) {
      const int element = ((first_row + ROW(b)) * HQ + QUERY_HEAD(b)) * D + lane * PER + p;
      query[b][p] = static_cast<float>(q[element]) * as_type<float>(SCALE);
    }
  }
}
for (int key = simdgroup; key < count; key += SIMDGROUPS) {
  float elements[PER];
  for (int p = 0; p < PER; p++) elements[p] = static_cast<float>(k[key * D + lane * PER + p]);
  for (int b = 0; b < BLOCK; b++) {
    float score = 0;
    for (int p = 0; p < PER; p++) score = fma(query[b][p], elements[p], score);
    score = simd_sum(score);
    if (lane == b) weights[key * BLOCK + b] = score;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int b = simdgroup; b < BLOCK; b += SIMDGROUPS) {
  // Keys of the part that the query's row sees.
  const int seen = b < own ? min(count, keys - rows + ROW(b) + 1 - start) : 0;
  float highest = LOWEST, sum = 0;
  for (int key = lane; key < seen; key += 32) {
    highest = fmax(highest, static_cast<float>(weights[key * BLOCK + b]));
  }
  highest = simd_max(highest);
  for (int key = lane; key < count; key += 32) {
    const float score = static_cast<float>(weights[key * BLOCK + b]);
    const float weight = key < seen ? exp(score - highest) : 0.0f;
    weights[key * BLOCK + b] = weight;
    sum += weight;
  }
  sum = simd_sum(sum);
  if (lane == 0 && b < own) {
    sums[2 * RESULT(b)] = highest;
    sums[2 * RESULT(b) + 1] = sum;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float mixed[BLOCK];
for (int b = 0; b < BLOCK; b++) mixed[b] = 0;
for (int key = 0; key < count; key++) {
  const float element = static_cast<float>(v[key * D + i]);
  for (int b = 0; b < BLOCK; b++) {
    mixed[b] = fma(static_cast<float>(weights[key * BLOCK + b]), element, mixed[b]);
  }
}
for (int b = 0; b < BLOCK; b++) {
  if (b < own) parts[RESULT(b) * D + i] = mixed[b];
}
