// The rows of a GatedDeltaNet layer from its projections to the gated norm. A threadgroup has one value head of a sequence:
// a simdgroup holds ROWS rows of the head's state in registers, and a lane every 32nd column of them. Tokens run one after
// another, so that results do not depend on how many run in one launch.
//
// Constants: HK, HV, DK, DV (heads and their dimensions), EPS (bits of the norm's epsilon), T (type of activations),
// JOINED (x_qkv has z, b and a beside it). STATE(i) and TAIL(i) are the i-th batch of states and of tails; RECORDED(x) is x
// in the kernel that also returns what the rows write to the state. `numbers` has the number of rows, and for each sequence
// the batch of its state, the index in it, the batch of its tail and the index in it. Shapes are those of gated_delta.rs.
constexpr int ROWS = 8, SIMDGROUPS = DV / ROWS, THREADS = 32 * SIMDGROUPS, TILE = 4, TAPS = 4, PER = DK / 32;
constexpr int CHANNELS = 2 * HK * DK + HV * DV, ALL = CHANNELS + HV * DV + 2 * HV, OWN = 2 * DK + DV;
constexpr int QKV_ROW = JOINED ? ALL : CHANNELS, Z_ROW = JOINED ? ALL : HV * DV, GATE_ROW = JOINED ? ALL : HV;
// Queries, keys and values of a tile, then its results and gates, each in rows of a token.
SHARED(float, inputs, TILE * OWN);
SHARED(float, mixed, TILE * DV);
SHARED(float, gates, TILE * DV);
SHARED(float, decays, TILE);
SHARED(float, strengths, TILE);
SHARED(float, factors, TILE);

const int head = int(threadgroup_position_in_grid.y), sequence = int(threadgroup_position_in_grid.z);
const int own = int(thread_position_in_threadgroup.x);
const int lane = int(thread_index_in_simdgroup), simdgroup = int(simdgroup_index_in_threadgroup);
const int key_head = head / (HV / HK);
const int rows = numbers[0];
const int state_batch = numbers[1 + 4 * sequence], state_index = numbers[2 + 4 * sequence];
const int tail_batch = numbers[3 + 4 * sequence], tail_index = numbers[4 + 4 * sequence];
const int first = sequence * rows, heads = sequence * HV + head;

const device float* state = STATE(state_batch) + (state_index * HV + head) * DV * DK;
const device T* tail = TAIL(tail_batch) + tail_index * (TAPS - 1) * CHANNELS;
const int z_at = JOINED ? CHANNELS : 0, b_at = JOINED ? CHANNELS + HV * DV : 0, a_at = JOINED ? b_at + HV : 0;

// The channel of element j of this head's query, key and values, one after another.
#define CHANNEL(j) \
  ((j) < 2 * DK ? ((j) / DK * HK + key_head) * DK + (j) % DK : 2 * HK * DK + head * DV + (j) - 2 * DK)
// Input c of the convolution at the row t, which may be one of the tail.
#define CONVOLVED(t, c) \
  ((t) >= 0 ? static_cast<float>(x_qkv[(first + (t)) * QKV_ROW + (c)]) \
            : static_cast<float>(tail[(TAPS - 1 + (t)) * CHANNELS + (c)]))

float s[ROWS][PER];
for (int r = 0; r < ROWS; r++) {
  for (int p = 0; p < PER; p++) s[r][p] = state[(simdgroup * ROWS + r) * DK + lane + 32 * p];
}
for (int start = 0; start < rows; start += TILE) {
  const int count = min(TILE, rows - start);
  for (int i = own; i < count * OWN; i += THREADS) {
    const int t = i / OWN, j = i % OWN, c = CHANNEL(j), row = start + t;
    float sum = CONVOLVED(row - 3, c) * static_cast<float>(tap0[c]);
    sum = fma(CONVOLVED(row - 2, c), static_cast<float>(tap1[c]), sum);
    sum = fma(CONVOLVED(row - 1, c), static_cast<float>(tap2[c]), sum);
    sum = fma(CONVOLVED(row, c), static_cast<float>(tap3[c]), sum);
    inputs[t * OWN + j] = sum / (1 + exp(-sum));
  }
  for (int i = own; i < count * DV; i += THREADS) {
    const int t = i / DV, j = i % DV;
    const float gate = static_cast<float>(x_z[z_at + (first + start + t) * Z_ROW + head * DV + j]);
    gates[i] = static_cast<float>(norm[j]) * gate / (1 + exp(-gate));
  }
  if (own < count) {
    const int row = (first + start + own) * GATE_ROW + head;
    const float x = static_cast<float>(x_a[a_at + row]) + static_cast<float>(dt_bias[head]);
    // log(1 + e^x); MSL has no log1p.
    const float small = exp(-fabs(x)), near = 1 + small;
    const float rest = near == 1 ? small : log(near) * (small / (near - 1));
    const float log_decay = -exp(static_cast<float>(a_log[head])) * (fmax(x, 0.0f) + rest);
    decays[own] = exp(log_decay);
    strengths[own] = 1 / (1 + exp(-static_cast<float>(x_b[b_at + row])));
    RECORDED(log_decays[heads * rows + start + own] = log_decay;)
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Unit vectors: first the queries of all tokens, which are also scaled, then the keys.
  for (int i = simdgroup; i < 2 * count; i += SIMDGROUPS) {
    const bool is_key = i >= count;
    const int t = is_key ? i - count : i, from = t * OWN + (is_key ? DK : 0) + lane;
    float x[PER], squares = 0;
    for (int p = 0; p < PER; p++) {
      x[p] = inputs[from + 32 * p];
      squares = fma(x[p], x[p], squares);
    }
    const float factor = rsqrt(simd_sum(squares) + 1e-6f) * (is_key ? 1.0f : rsqrt(float(DK)));
    for (int p = 0; p < PER; p++) {
      inputs[from + 32 * p] = x[p] * factor;
      RECORDED(if (is_key) written_keys[(heads * rows + start + t) * DK + lane + 32 * p] = x[p] * factor;)
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int t = 0; t < count; t++) {
    float q[PER], k[PER];
    for (int p = 0; p < PER; p++) {
      q[p] = inputs[t * OWN + lane + 32 * p];
      k[p] = inputs[t * OWN + DK + lane + 32 * p];
    }
    const float decay = decays[t], strength = strengths[t];
    for (int r = 0; r < ROWS; r++) {
      const int value = simdgroup * ROWS + r;
      float recalled = 0;
      for (int p = 0; p < PER; p++) recalled = fma(s[r][p], k[p], recalled);
      recalled = simd_sum(recalled);
      const float d = strength * (inputs[t * OWN + 2 * DK + value] - decay * recalled);
      float y = 0;
      for (int p = 0; p < PER; p++) {
        // Rounded as in rewind.metal.
        s[r][p] = fma(d, k[p], s[r][p] * decay);
        y = fma(s[r][p], q[p], y);
      }
      y = simd_sum(y);
      if (lane == r) {
        mixed[t * DV + value] = y;
        RECORDED(corrections[(heads * rows + start + t) * DV + value] = d;)
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int t = simdgroup; t < count; t += SIMDGROUPS) {
    float squares = 0;
    for (int j = lane; j < DV; j += 32) squares = fma(mixed[t * DV + j], mixed[t * DV + j], squares);
    squares = simd_sum(squares);
    if (lane == 0) factors[t] = rsqrt(squares / DV + as_type<float>(EPS));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = own; i < count * DV; i += THREADS) {
    const int t = i / DV, j = i % DV;
    out[(first + start + t) * HV * DV + head * DV + j] = static_cast<T>(mixed[i] * factors[t] * gates[i]);
  }
  // A thread overwrites in the next tile only those gates that it has read itself; barriers come before all else.
}
for (int r = 0; r < ROWS; r++) {
  for (int p = 0; p < PER; p++) {
    next_state[(heads * DV + simdgroup * ROWS + r) * DK + lane + 32 * p] = s[r][p];
  }
}
// A key head's first value head writes the key head's channels.
const int skip = head % (HV / HK) == 0 ? 0 : 2 * DK;
for (int i = own; i < (TAPS - 1) * (OWN - skip); i += THREADS) {
  const int row = i / (OWN - skip), j = skip + i % (OWN - skip), c = CHANNEL(j);
  next_tail[(sequence * (TAPS - 1) + row) * CHANNELS + c] = static_cast<T>(CONVOLVED(rows - (TAPS - 1) + row, c));
}
