// Attention of a few rows of each span over the span's own keys, part by part. A block computes up to BLOCK
// queries of one key head over one part of SPLIT keys; `attention_join.cu` joins the parts. A part is always the
// same keys, so that a row's result does not depend on the other spans of the launch.
//
// Constants: HQ, HKV, D, SPLIT, SCALE (bits of the factor of scores), T. Number: total_rows.
constexpr int WARPS = 8, BLOCK = 4, GROUP = HQ / HKV, PER = D / 32, BYTES = PER * sizeof(T);
// Keys of a warp, and those that it computes at a time.
constexpr int OWN = SPLIT / WARPS, TIME = 4;
struct alignas(BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 2) Lane { T x[PER]; };

const float none = __int_as_float(0xff800000);  // minus infinity

__shared__ alignas(16) float weights[SPLIT][BLOCK];
__shared__ float mixed[WARPS][BLOCK][D];

const int part = blockIdx.x, span = blockIdx.z, head = blockIdx.y % HKV, block = blockIdx.y / HKV;
int first = 0, rows = 0, length = 0, capacity = 0, begin = 0;
const T* buffer = nullptr;
// A part lies in one buffer: there are whole parts of shared keys. `begin` is the first key of that buffer.
#define FIND(i)                                                                               \
  if (span == i) {                                                                            \
    const bool is_shared = part * SPLIT < shared_rows##i;                                     \
    first = first##i, rows = rows##i, length = shared_rows##i + place##i + rows##i;           \
    capacity = is_shared ? shared_capacity##i : capacity##i, begin = is_shared ? 0 : shared_rows##i; \
    buffer = is_shared ? shared##i : kv##i;                                                   \
  }
EACH_SPAN(FIND)
const int start = part * SPLIT, count = min(SPLIT, length - start), own = min(BLOCK, GROUP * rows - block * BLOCK);
// A block that waits for nothing may end before the kernels before it, and the next kernel would not wait for them.
if (count <= 0 || own <= 0) return wait_for_inputs();
const size_t offset = (size_t(head) * capacity + start - begin) * D;
const Lane* const k = reinterpret_cast<const Lane*>(buffer + offset);
const Lane* const v = reinterpret_cast<const Lane*>(buffer + offset + size_t(HKV) * capacity * D);
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
for (int line = threadIdx.x; line * 128 < count * D * int(sizeof(T)); line += 32 * WARPS) {
  prefetch(reinterpret_cast<const char*>(k) + line * 128);
  prefetch(reinterpret_cast<const char*>(v) + line * 128);
}
wait_for_inputs();

// Row and query head of the block's query i.
auto row = [&](int i) { return (block * BLOCK + i) / GROUP; };
auto query_head = [&](int i) { return head * GROUP + (block * BLOCK + i) % GROUP; };

float query[BLOCK][PER];
for (int i = 0; i < BLOCK; i++) {
  Lane x{};
  if (i < own) {
    x = reinterpret_cast<const Lane*>(q + (size_t(first + row(i)) * HQ + query_head(i)) * D)[lane];
  }
  for (int p = 0; p < PER; p++) query[i][p] = float(x.x[p]) * __int_as_float(SCALE);
}
// Key j of a warp is key j WARPS + warp of the part.
#pragma unroll
for (int j = 0; j < OWN; j += TIME) {
  Lane x[TIME];
  for (int t = 0; t < TIME; t++) {
    const int key = (j + t) * WARPS + warp;
    x[t] = k[size_t(min(key, count - 1)) * 32 + lane];
  }
  float dots[TIME * BLOCK];
  for (int t = 0; t < TIME; t++) {
    for (int i = 0; i < BLOCK; i++) {
      float sum = 0;
      for (int p = 0; p < PER; p++) sum += query[i][p] * float(x[t].x[p]);
      dots[t * BLOCK + i] = sum;
    }
  }
  const float score = lane_sums(dots, lane);
  const int number = lane / 2, key = (j + number / BLOCK) * WARPS + warp, i = number % BLOCK;
  if (lane % 2 == 0) weights[key][i] = key < count && start + key <= length - rows + row(i) ? score : none;
}
__syncthreads();
if (warp < own) {
  float highest = none, sum = 0;
  for (int key = lane; key < count; key += 32) highest = fmaxf(highest, weights[key][warp]);
  for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  for (int key = lane; key < count; key += 32) {
    const float weight = highest == none ? 0 : expf(weights[key][warp] - highest);
    weights[key][warp] = weight;
    sum += weight;
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) {
    const size_t at = (size_t(part) * total_rows + first + row(warp)) * HQ + query_head(warp);
    sums[2 * at] = highest;
    sums[2 * at + 1] = sum;
  }
}
__syncthreads();
float mix[BLOCK][PER] = {};
#pragma unroll
for (int j = 0; j < OWN; j++) {
  const int key = j * WARPS + warp;
  if (key >= count) break;
  const Lane x = v[size_t(key) * 32 + lane];
  const float4 weight = *reinterpret_cast<const float4*>(weights[key]);
  const float w[BLOCK] = {weight.x, weight.y, weight.z, weight.w};
  for (int p = 0; p < PER; p++) {
    const float element = float(x.x[p]);
    for (int i = 0; i < BLOCK; i++) mix[i][p] += (i < own ? w[i] : 0) * element;
  }
}
for (int i = 0; i < BLOCK; i++) {
  for (int p = 0; p < PER; p++) mixed[warp][i][lane * PER + p] = mix[i][p];
}
__syncthreads();
for (int i = threadIdx.x; i < own * D; i += 32 * WARPS) {
  float sum = 0;
  for (int w = 0; w < WARPS; w++) sum += mixed[w][i / D][i % D];
  const size_t at = (size_t(part) * total_rows + first + row(i / D)) * HQ + query_head(i / D);
  parts[at * D + i % D] = sum;
}
