// State and tail of one sequence after the first `keep` of the `rows` rows of a draft. A thread computes one element: the
// first DV * DK * HEADS are those of the state, the others those of the tail.
//
// Constants: HEADS, DV, DK (value heads and the dimensions of a head), CHANNELS and TAPS (columns and rows of the tail). T is
// the type of the tail. Shapes are those of rewind.rs.
const int keep = numbers[0], rows = numbers[1], state_index = numbers[2], write_index = numbers[3];
const int tail_index = numbers[4], x_index = numbers[5], x_width = numbers[6];
const int i = int(thread_position_in_grid.x);
constexpr int STATE = HEADS * DV * DK;
if (i < STATE) {
  const int row = i / DK, column = i % DK;
  const int first = (write_index * HEADS + row / DV) * rows;
  float s = states[state_index * STATE + i];
  for (int t = 0; t < keep; t++) {
    const float decay = exp(log_decays[first + t]), d = corrections[(first + t) * DV + row % DV];
    // Rounded as in gated_delta.metal.
    s = fma(d, keys[(first + t) * DK + column], s * decay);
  }
  next_state[i] = s;
} else if (i - STATE < TAPS * CHANNELS) {
  const int at = i - STATE, row = keep + at / CHANNELS, c = at % CHANNELS;
  // Of the tail before the draft, or of its rows.
  next_tail[at] = row < TAPS ? tails[(tail_index * TAPS + row) * CHANNELS + c]
                             : x[(x_index * rows + row - TAPS) * x_width + c];
}
