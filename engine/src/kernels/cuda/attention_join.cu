// Joins the parts that attention.cu computed, one block for a query head of a row. Constants: HQ, D, SPLIT, T, GATE_ROW
// (elements of a row of `gates`, in which each head has a query and then its gate; 0 for none). Number: total_rows.
// Results are rounded where the separate operations round.
constexpr int WARPS = D / 32, TIME = 256;
__shared__ float maxima[WARPS], weights[TIME], lengths[TIME];
wait_for_inputs();
const int row = blockIdx.y, head = blockIdx.x, i = threadIdx.x;
int count = 0;
#define FIND(i) \
  if (row >= first##i && row < first##i + rows##i) count = (shared_rows##i + place##i + rows##i + SPLIT - 1) / SPLIT;
EACH_SPAN(FIND)
const auto at = [&](int part) { return (size_t(part) * total_rows + row) * HQ + head; };
float gate = 0;
if (GATE_ROW > 0) gate = float(gates[size_t(row) * GATE_ROW + head * 2 * D + D + i]);
// From minus infinity on.
float highest = __int_as_float(0xff800000), sum = 0, mixed = 0;
for (int part = i; part < count; part += D) highest = fmaxf(highest, sums[2 * at(part)]);
for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
if (i % 32 == 0) maxima[i / 32] = highest;
__syncthreads();
for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, maxima[w]);
for (int start = 0; start < count; start += TIME) {
  const int parts_now = min(TIME, count - start);
  for (int part = i; part < parts_now; part += D) {
    weights[part] = expf(sums[2 * at(start + part)] - highest);
    lengths[part] = sums[2 * at(start + part) + 1];
  }
  __syncthreads();
#pragma unroll 8
  for (int part = 0; part < parts_now; part++) {
    // A part without a visible key has no weight, and its sum is 0.
    sum += weights[part] * lengths[part];
    mixed += weights[part] * parts[at(start + part) * D + i];
  }
  __syncthreads();
}
T y = T(mixed / sum);
if (GATE_ROW > 0) y = T(float(T(1 / (1 + expf(-gate)))) * float(y));
out[(size_t(row) * HQ + head) * D + i] = y;
