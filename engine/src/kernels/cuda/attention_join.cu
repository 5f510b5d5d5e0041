// Joins the parts that attention.cu computed, one block for a query head of a row. Constants: HQ, D, SPLIT, T.
const int row = blockIdx.y, head = blockIdx.x, i = threadIdx.x, total_rows = sums_shape[1];
int count = 0;
for (int span = 0; span < spans_shape[0]; span++) {
  if (row >= spans[4 * span] && row < spans[4 * span] + spans[4 * span + 1]) {
    count = (spans[4 * span + 2] + SPLIT - 1) / SPLIT;
  }
}
const auto at = [&](int part) { return (size_t(part) * total_rows + row) * HQ + head; };
// From minus infinity on.
float highest = __int_as_float(0xff800000), sum = 0, mixed = 0;
for (int part = 0; part < count; part++) highest = fmaxf(highest, sums[2 * at(part)]);
for (int part = 0; part < count; part++) {
  const float weight = expf(sums[2 * at(part)] - highest);
  // A part without a visible key has no weight.
  if (weight > 0) {
    sum += weight * sums[2 * at(part) + 1];
    mixed += weight * parts[at(part) * D + i];
  }
}
out[(size_t(row) * HQ + head) * D + i] = T(mixed / sum);
