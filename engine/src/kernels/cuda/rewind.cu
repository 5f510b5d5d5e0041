// State and tail of one sequence after the first `keep` of the `rows` rows of a draft. Warps have a row of the state
// each; the blocks after theirs copy the tail.
//
// Constants: HEADS, DV, DK (value heads and the dimensions of a head), CHANNELS and TAPS (columns and rows of the tail). T is
// the type of the tail. Numbers: keep, rows, the index of the sequence in each batch, and x_width, the columns of x, of which
// the first CHANNELS are the inputs of the convolution. Shapes are those of rewind.rs.
constexpr int WARPS = 16, THREADS = 32 * WARPS, PER = DK / 32, STATE_BLOCKS = HEADS * DV / WARPS;
struct alignas(PER % 4 == 0 ? 16 : 4 * PER) Lane { float x[PER]; };

wait_for_inputs();
if (blockIdx.x < STATE_BLOCKS) {
  const int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t first = (size_t(write_index) * HEADS + row / DV) * rows;
  Lane s = reinterpret_cast<const Lane*>(states + (size_t(state_index) * HEADS * DV + row) * DK)[lane];
  for (int t = 0; t < keep; t++) {
    const Lane k = reinterpret_cast<const Lane*>(keys + (first + t) * DK)[lane];
    const float decay = expf(log_decays[first + t]), d = corrections[(first + t) * DV + row % DV];
    for (int p = 0; p < PER; p++) s.x[p] = written(s.x[p], decay, d, k.x[p]);
  }
  reinterpret_cast<Lane*>(next_state + size_t(row) * DK)[lane] = s;
  return;
}
const int i = (blockIdx.x - STATE_BLOCKS) * THREADS + threadIdx.x;
if (i < TAPS * CHANNELS) {
  const int row = keep + i / CHANNELS, c = i % CHANNELS;
  next_tail[i] = row < TAPS ? tails[(size_t(tail_index) * TAPS + row) * CHANNELS + c]
                            : x[(size_t(x_index) * rows + row - TAPS) * x_width + c];
}
