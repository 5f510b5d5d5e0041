// The rows of a GatedDeltaNet layer from its projections to the gated norm, one block for a value head of a
// sequence. A warp holds ROWS rows of the state in registers; a lane holds PER columns of each. Tokens run one
// after another, so that results do not depend on how many run in one launch.
//
// Constants: HK, HV, DK, DV (heads and their dimensions), EPS (bits of the norm's epsilon), T (type of activations), JOINED
// (qkv, z, b and a are the same array, which has them side by side). Number: rows. RECORDED(x) is x in the kernel that
// also returns what the rows write to the state. Shapes are those of gated_delta.rs.
constexpr int WARPS = 16, THREADS = 32 * WARPS, TILE = 8, TAPS = 4;
const T* const taps[TAPS] = {tap0, tap1, tap2, tap3};
constexpr int PER = DK / 32, ROWS = DV / WARPS, CHANNELS = 2 * HK * DK + HV * DV;
constexpr int ALL = CHANNELS + HV * DV + 2 * HV;
constexpr int QKV_ROW = JOINED ? ALL : CHANNELS, Z_ROW = JOINED ? ALL : HV * DV, GATE_ROW = JOINED ? ALL : HV;
struct alignas(PER % 4 == 0 ? 16 : 4 * PER) Lane { float x[PER]; };

__shared__ alignas(16) float queries[TILE][DK], keys[TILE][DK], values[TILE][DV], mixed[TILE][DV];
__shared__ float logs[TILE], strengths[TILE];

const int head = blockIdx.x, sequence = blockIdx.y;
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
// Channel of element j of this head's query, key and value, one after another.
auto channel = [&](int j) {
  if (j < 2 * DK) return (j / DK * HK + key_head) * DK + j % DK;
  return 2 * HK * DK + head * DV + j - 2 * DK;
};
auto total = [](float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
};

Lane s[ROWS];
for (int r = 0; r < ROWS; r++) {
  s[r] = reinterpret_cast<const Lane*>(state + (heads * DV + warp * ROWS + r) * DK)[lane];
}
for (int start = 0; start < rows; start += TILE) {
  const int count = min(TILE, rows - start);
  for (int i = threadIdx.x; i < count * (2 * DK + DV); i += THREADS) {
    const int t = i / (2 * DK + DV), j = i % (2 * DK + DV), c = channel(j);
    float sum = 0;
    for (int tap = 0; tap < TAPS; tap++) {
      sum += input(start + t + tap - (TAPS - 1), c) * float(taps[tap][c]);
    }
    sum /= 1 + expf(-sum);
    (j < DK ? queries[t][j] : j < 2 * DK ? keys[t][j - DK] : values[t][j - 2 * DK]) = sum;
  }
  if (threadIdx.x < count) {
    const int t = start + threadIdx.x;
    const float x = float(a_rows[size_t(t) * GATE_ROW]) + float(dt_bias[head]);
    const float log_decay = -expf(a_log[head]) * (fmaxf(x, 0) + log1pf(expf(-fabsf(x))));
    logs[threadIdx.x] = log_decay;
    strengths[threadIdx.x] = 1 / (1 + expf(-float(b_rows[size_t(t) * GATE_ROW])));
    RECORDED(log_decays[heads * rows + t] = log_decay;)
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
    RECORDED(if (is_key) reinterpret_cast<Lane*>(written_keys + (heads * rows + start + t) * DK)[lane] = x;)
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
        s[r].x[p] = decay * s[r].x[p] + d * k.x[p];
        y[r] += s[r].x[p] * q.x[p];
      }
      y[r] = total(y[r]);
      if (lane == r) {
        RECORDED(corrections[(heads * rows + start + t) * DV + warp * ROWS + r] = d;)
        mixed[t][warp * ROWS + r] = y[r];
      }
    }
  }
  __syncthreads();
  for (int t = warp; t < count; t += WARPS) {
    float squares = 0;
    for (int i = lane; i < DV; i += 32) squares += mixed[t][i] * mixed[t][i];
    const float factor = rsqrtf(total(squares) / DV + __int_as_float(EPS));
    const size_t at = (first + start + t) * HV * DV + head * DV;
    for (int i = lane; i < DV; i += 32) {
      const float gate = float(z_rows[size_t(start + t) * Z_ROW + i]);
      out[at + i] = T(mixed[t][i] * factor * float(norm[i]) * gate / (1 + expf(-gate)));
    }
  }
  __syncthreads();
}
for (int r = 0; r < ROWS; r++) {
  reinterpret_cast<Lane*>(next_state + (heads * DV + warp * ROWS + r) * DK)[lane] = s[r];
}
// The first value head of a key head writes the key head's channels.
const int skip = head % (HV / HK) == 0 ? 0 : 2 * DK;
for (int i = threadIdx.x; i < (TAPS - 1) * (2 * DK + DV - skip); i += THREADS) {
  const int row = i / (2 * DK + DV - skip), c = channel(skip + i % (2 * DK + DV - skip));
  next_tail[(size_t(sequence) * (TAPS - 1) + row) * CHANNELS + c] = T(input(rows - (TAPS - 1) + row, c));
}
