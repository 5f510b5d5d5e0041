// Joins the parts that attention.metal computed. A threadgroup has one query head of a row, a
// thread one dimension of it.
//
// Constants: HQ, D, SPLIT, TIME (parts at a time), GATED (the result is multiplied by the sigmoid
// of its gate), T. `numbers` is that of attention.metal. Shapes are those of attention.rs. Results
// are rounded where the separate operations round.
constexpr int SIMDGROUPS = D / 32, SPAN = 10;
constexpr float LOWEST = -3e38f;
SHARED(float, maxima, SIMDGROUPS);
SHARED(float, weights, TIME);
SHARED(float, lengths, TIME);

const int head = int(threadgroup_position_in_grid.y);
const int row = int(threadgroup_position_in_grid.z);
const int i = int(thread_position_in_threadgroup.x);
int at = 1;
for (int s = 1; s < numbers[0] && row >= numbers[1 + SPAN * s]; s++) at = 1 + SPAN * s;
const int count = (numbers[at + 2] + SPLIT - 1) / SPLIT;
const int first = numbers[at + 3] + (row - numbers[at]) * count;
#define RESULT(part) ((first + (part)) * HQ + head)

float highest = LOWEST;
for (int part = i; part < count; part += D) highest = fmax(highest, sums[2 * RESULT(part)]);
highest = simd_max(highest);
if (thread_index_in_simdgroup == 0) maxima[simdgroup_index_in_threadgroup] = highest;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int s = 0; s < SIMDGROUPS; s++) highest = fmax(highest, static_cast<float>(maxima[s]));
float sum = 0, mixed = 0;
for (int start = 0; start < count; start += TIME) {
  const int now = min(TIME, count - start);
  // A part without a visible key has no weight, and its sum is 0.
  for (int part = i; part < now; part += D) {
    weights[part] = exp(sums[2 * RESULT(start + part)] - highest);
    lengths[part] = sums[2 * RESULT(start + part) + 1];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int part = 0; part < now; part++) {
    const float weight = weights[part];
    sum = fma(weight, static_cast<float>(lengths[part]), sum);
    mixed = fma(weight, parts[RESULT(start + part) * D + i], mixed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
const T result = static_cast<T>(mixed / sum);
const int to = (row * HQ + head) * D + i;
if (GATED) {
  const T gate = static_cast<T>(1 / (1 + exp(-static_cast<float>(gates[to * GATED]))));
  out[to] = static_cast<T>(static_cast<float>(gate) * static_cast<float>(result));
} else {
  out[to] = result;
}
