// Joins the parts that attention.cu computed, one block for a query head of a row. Constants: HQ, D, SPLIT, T, GATE_ROW
// (elements of a row of `gates`, in which each head has a query and then its gate; 0 for none). Numbers: total_rows,
// span_count. Results are rounded where the separate operations round.
const int row = blockIdx.y, head = blockIdx.x, i = threadIdx.x;
int count = 0;
for (int span = 0; span < span_count; span++) {
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
T y = T(mixed / sum);
if (GATE_ROW > 0) {
  const float gate = float(gates[size_t(row) * GATE_ROW + head * 2 * D + D + i]);
  y = T(float(T(1 / (1 + expf(-gate)))) * float(y));
}
out[(size_t(row) * HQ + head) * D + i] = y;
