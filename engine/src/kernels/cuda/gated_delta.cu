// The rows of a GatedDeltaNet layer from its projections to the gated norm, one cluster of blocks for a value head of
// a sequence. The blocks have different values of the head, and each computes the head's queries and keys. A warp holds
// ROWS rows of the state in registers; a lane holds PER columns of each. Tokens run one after another, so that results do
// not depend on how many run in one launch. Squares of the norm are added by quarters of the head, whatever the cluster.
//
// Constants: HK, HV, DK, DV (heads and their dimensions), EPS (bits of the norm's epsilon), T (type of activations), JOINED
// (qkv, z, b and a are the same array, which has them side by side). Number: rows. RECORDED(x) is x in the kernel that
// also returns what the rows write to the state. Shapes are those of gated_delta.rs.
constexpr int WARPS = 16, THREADS = 32 * WARPS, TILE = 8, TAPS = 4;
const T* const taps[TAPS] = {tap0, tap1, tap2, tap3};
constexpr int OWN = DV / CLUSTER, QUARTERS = 4 / CLUSTER;
constexpr int PER = DK / 32, ROWS = OWN / WARPS, CHANNELS = 2 * HK * DK + HV * DV;
constexpr int ALL = CHANNELS + HV * DV + 2 * HV;
constexpr int QKV_ROW = JOINED ? ALL : CHANNELS, Z_ROW = JOINED ? ALL : HV * DV, GATE_ROW = JOINED ? ALL : HV;
struct alignas(PER % 4 == 0 ? 16 : 4 * PER) Lane { float x[PER]; };

__shared__ alignas(16) float queries[TILE][DK], keys[TILE][DK], values[TILE][OWN], mixed[TILE][OWN], gates[TILE][OWN];
__shared__ float logs[TILE], strengths[TILE], quarter_squares[TILE][QUARTERS];

const int head = blockIdx.x / CLUSTER, part = blockIdx.x % CLUSTER, sequence = blockIdx.y;
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
const int key_head = head / (HV / HK);
const size_t first = size_t(sequence) * rows, heads = size_t(sequence) * HV + head;

const T* const z_rows = z + (JOINED ? CHANNELS : 0) + first * Z_ROW + head * DV;
const T* const b_rows = b + (JOINED ? CHANNELS + HV * DV : 0) + first * GATE_ROW + head;
const T* const a_rows = a + (JOINED ? CHANNELS + HV * DV + HV : 0) + first * GATE_ROW + head;
auto input = [&](int t, int channel) {
  return t >= 0 ? float(qkv[(first + t) * QKV_ROW + channel])
                : float(tail[(size_t(sequence) * (TAPS - 1) + TAPS - 1 + t) * CHANNELS + channel]);
};
// Channel of element j of this block's query, key and values, one after another.
auto channel = [&](int j) {
  if (j < 2 * DK) return (j / DK * HK + key_head) * DK + j % DK;
  return 2 * HK * DK + head * DV + part * OWN + j - 2 * DK;
};
auto total = [](float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
};

// The first row of this warp's part of the state.
const size_t state_row = heads * DV + part * OWN + warp * ROWS;
for (int line = lane; line < ROWS * DK / 32; line += 32) prefetch(state + state_row * DK + line * 32);
for (int i = threadIdx.x; i < TAPS * ((2 * DK + OWN + 63) / 64); i += THREADS) {
  prefetch(taps[i % TAPS] + channel(i / TAPS * 64));
}
wait_for_inputs();
Lane s[ROWS];
for (int r = 0; r < ROWS; r++) s[r] = reinterpret_cast<const Lane*>(state + (state_row + r) * DK)[lane];
for (int start = 0; start < rows; start += TILE) {
  const int count = min(TILE, rows - start);
  for (int i = threadIdx.x; i < count * (2 * DK + OWN); i += THREADS) {
    const int t = i / (2 * DK + OWN), j = i % (2 * DK + OWN), c = channel(j);
    float sum = 0;
    for (int tap = 0; tap < TAPS; tap++) {
      sum += input(start + t + tap - (TAPS - 1), c) * float(taps[tap][c]);
    }
    sum /= 1 + expf(-sum);
    (j < DK ? queries[t][j] : j < 2 * DK ? keys[t][j - DK] : values[t][j - 2 * DK]) = sum;
  }
  // By the threads that are left if there are few tokens.
  for (int i = THREADS - 1 - threadIdx.x; i < count * OWN; i += THREADS) {
    const int t = i / OWN, j = i % OWN;
    const float gate = float(z_rows[size_t(start + t) * Z_ROW + part * OWN + j]);
    gates[t][j] = float(norm[part * OWN + j]) * gate / (1 + expf(-gate));
  }
  const int own_token = int(threadIdx.x) - THREADS + 64;
  if (own_token >= 0 && own_token < count) {
    const int t = start + own_token;
    const float x = float(a_rows[size_t(t) * GATE_ROW]) + float(dt_bias[head]);
    const float log_decay = -expf(a_log[head]) * (fmaxf(x, 0) + log1pf(expf(-fabsf(x))));
    logs[own_token] = log_decay;
    strengths[own_token] = 1 / (1 + expf(-float(b_rows[size_t(t) * GATE_ROW])));
    RECORDED(if (part == 0) log_decays[heads * rows + t] = log_decay;)
  }
  __syncthreads();
  for (int i = warp; i < 2 * count; i += WARPS) {
    const bool is_key = i >= count;
    const int t = is_key ? i - count : i;
    Lane& x = reinterpret_cast<Lane*>(is_key ? keys[t] : queries[t])[lane];
    float squares = 0;
    for (int p = 0; p < PER; p++) squares += x.x[p] * x.x[p];
    const float factor = rsqrtf(total(squares) + 1e-6f) * (is_key ? 1.0f : rsqrtf(float(DK)));
    for (int p = 0; p < PER; p++) x.x[p] *= factor;
    RECORDED(if (is_key && part == 0) reinterpret_cast<Lane*>(written_keys + (heads * rows + start + t) * DK)[lane] = x;)
  }
  __syncthreads();
  for (int t = 0; t < count; t++) {
    const Lane k = reinterpret_cast<const Lane*>(keys[t])[lane];
    const Lane q = reinterpret_cast<const Lane*>(queries[t])[lane];
    const float decay = expf(logs[t]), strength = strengths[t];
    float y[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float recalled = 0;
      for (int p = 0; p < PER; p++) recalled += s[r].x[p] * k.x[p];
      const float d = strength * (values[t][warp * ROWS + r] - decay * total(recalled));
      y[r] = 0;
      for (int p = 0; p < PER; p++) {
        s[r].x[p] = written(s[r].x[p], decay, d, k.x[p]);
        y[r] += s[r].x[p] * q.x[p];
      }
      y[r] = total(y[r]);
      if (lane == r) {
        RECORDED(corrections[(heads * rows + start + t) * DV + part * OWN + warp * ROWS + r] = d;)
        mixed[t][warp * ROWS + r] = y[r];
      }
    }
  }
  __syncthreads();
  if (start + TILE >= rows) {
    for (int r = 0; r < ROWS; r++) reinterpret_cast<Lane*>(next_state + (state_row + r) * DK)[lane] = s[r];
  }
  for (int i = warp; i < count * QUARTERS; i += WARPS) {
    const int t = i / QUARTERS, quarter = i % QUARTERS;
    float sum = 0;
    for (int j = lane; j < DV / 4; j += 32) sum += mixed[t][quarter * (DV / 4) + j] * mixed[t][quarter * (DV / 4) + j];
    sum = total(sum);
    if (lane == 0) quarter_squares[t][quarter] = sum;
  }
  sync_cluster<CLUSTER>();
  for (int i = threadIdx.x; i < count * OWN; i += THREADS) {
    const int t = i / OWN, j = i % OWN;
    float sum = 0;
    for (int q = 0; q < 4; q++) sum += remote<CLUSTER>(&quarter_squares[t][q % QUARTERS], q / QUARTERS);
    const float factor = rsqrtf(sum / DV + __int_as_float(EPS));
    out[(first + start + t) * HV * DV + head * DV + part * OWN + j] = T(mixed[t][j] * factor * gates[t][j]);
  }
  // No block ends, or begins with further tokens, while another reads its squares.
  sync_cluster<CLUSTER>();
}
// The first block of a key head's first value head writes the key head's channels.
const int skip = head % (HV / HK) == 0 && part == 0 ? 0 : 2 * DK;
for (int i = threadIdx.x; i < (TAPS - 1) * (2 * DK + OWN - skip); i += THREADS) {
  const int row = i / (2 * DK + OWN - skip), c = channel(skip + i % (2 * DK + OWN - skip));
  next_tail[(size_t(sequence) * (TAPS - 1) + row) * CHANNELS + c] = T(input(rows - (TAPS - 1) + row, c));
}
