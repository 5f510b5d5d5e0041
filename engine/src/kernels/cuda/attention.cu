// Attention of a few rows of each span over the span's own keys, part by part. A block computes up to BLOCK
// queries of one key head over one part of SPLIT keys; `attention_join.cu` joins the parts. A part is always the
// same keys, so that a row's result does not depend on the other spans of the launch.
//
// Constants: HQ, HKV, D, SPLIT, SCALE (bits of the factor of scores), SPANS, T. Number: total_rows. `spans` has for each span its first row,
// rows, keys, and the capacity of its buffer, which is one of
// BUFFERS, [2 HKV, capacity, D]: keys, then values.
constexpr int WARPS = 8, BLOCK = 4, GROUP = HQ / HKV, PER = D / 32, BYTES = PER * sizeof(T);
struct alignas(BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : 2) Lane { T x[PER]; };

const float none = __int_as_float(0xff800000);  // minus infinity

__shared__ alignas(16) float weights[SPLIT][BLOCK];
__shared__ float mixed[WARPS][BLOCK][D];

const int part = blockIdx.x, span = blockIdx.z, head = blockIdx.y % HKV, block = blockIdx.y / HKV;
const int first = spans[4 * span], rows = spans[4 * span + 1], length = spans[4 * span + 2];
const int start = part * SPLIT, count = min(SPLIT, length - start), own = min(BLOCK, GROUP * rows - block * BLOCK);
if (count <= 0 || own <= 0) return;
const T* const buffers[SPANS] = BUFFERS;
const size_t capacity = spans[4 * span + 3], offset = (head * capacity + start) * D;
const Lane* const k = reinterpret_cast<const Lane*>(buffers[span] + offset);
const Lane* const v = reinterpret_cast<const Lane*>(buffers[span] + offset + HKV * capacity * D);
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

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
#pragma unroll 4
for (int key = warp; key < count; key += WARPS) {
  const Lane x = k[size_t(key) * 32 + lane];
  float score[BLOCK] = {};
  for (int p = 0; p < PER; p++) {
    const float element = float(x.x[p]);
    for (int i = 0; i < BLOCK; i++) score[i] += query[i][p] * element;
  }
  for (int i = 0; i < BLOCK; i++) {
    for (int step = 16; step > 0; step /= 2) score[i] += __shfl_xor_sync(~0u, score[i], step);
    if (lane == i) weights[key][i] = start + key <= length - rows + row(i) ? score[i] : none;
  }
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
#pragma unroll 4
for (int key = warp; key < count; key += WARPS) {
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
