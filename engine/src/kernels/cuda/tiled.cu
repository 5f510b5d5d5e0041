// Products of few rows with a matrix of 4 bits in groups of 64, in the tiles of tiled.rs, on tensor cores.
//
// The inputs are divided into quarters. A warp adds up the products of a tile of 16 outputs with one quarter; the sums
// of the four quarters are added in shared memory. The blocks of a cluster have different quarters of the same tiles, so
// that each holds only its part of the rows x. Columns of mma do not mix and sums are added in one order, so that
// a row's bits do not depend on the other rows, on the cluster or on the number of warps.
//
// The rows can be normed while they are read, with FORM 1: RMS norm by `norm`. With ADD 1, `residual` is added to the
// result. With GATED 1, the first half of the outputs are gates and the second half ups, and the result is silu(gate) up.
// Results are rounded where the separate operations round.
//
// Constants: FORM, EPS (bits of the norm's epsilon), ADD, GATED, K (inputs, a multiple of 256), WARPS, CLUSTER (blocks: 1,
// 2 or 4), SETS (of 8 rows in a block), T (bfloat16). Numbers: outputs, all_rows. Further rows are further blocks along
// y, which read the weights from the cache.
constexpr int THREADS = 32 * WARPS, SLABS = K / 256, ROWS = 8 * SETS, QUARTERS = 4 / CLUSTER;
// Tiles that a block computes at a time, and its part of the inputs.
constexpr int TILES = WARPS / QUARTERS, OWN_SLABS = (SLABS * QUARTERS + 3) / 4, FRAGMENTS = OWN_SLABS * 256;
// All quarters take as many steps; those with fewer slabs do nothing in the last one.
constexpr int STEPS = (SLABS + 3) / 4;
constexpr int STRIDE = TILES * 16 + 4, PARTIAL = QUARTERS * ROWS * STRIDE;
// Slabs of weights that are read ahead, and groups whose products do not wait for each other: with few rows there is
// little else to do, with many there are no registers left.
constexpr int DEPTH = SETS == 1 ? 2 : 1, SIDE = SETS == 1 ? 4 : SETS == 2 ? 2 : 1;
extern __shared__ uint4 shared[];
// x in the order of mma's second operand, [SETS][OWN_SLABS][4 groups][2][32 lanes].
uint4* const fragments = shared;
// Sums of x over a group, [OWN_SLABS * 4][ROWS].
float* const group_sums = reinterpret_cast<float*>(shared + SETS * FRAGMENTS);
// Sums of squares of x over a slab, [ROWS][SLABS].
float* const squares = group_sums + OWN_SLABS * 4 * ROWS;
// Sums of the quarters of this block, for this turn and the last one, [2][QUARTERS][ROWS][STRIDE].
float* const partial = squares + (FORM == 1 ? ROWS * SLABS : 0);

const int cluster = blockIdx.x / CLUSTER, place = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER;
const int first_row = ROWS * int(blockIdx.y);
const int rows = min(ROWS, all_rows - first_row);
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
const int quarter = place * QUARTERS + warp / TILES;
const int first_slab = SLABS * quarter / 4, end_slab = SLABS * (quarter + 1) / 4;
const int block_slab = SLABS * place / CLUSTER, block_slabs = SLABS * (place + 1) / CLUSTER - block_slab;
const int tiles = outputs / 16, turns = (tiles + TILES * clusters - 1) / (TILES * clusters);
// The tile of this warp in a turn; -1 if there is none. A gate's tile is beside its up's.
auto tile_of = [&](int turn) {
  const int at = (turn * clusters + cluster) * TILES + warp % TILES;
  return turn >= turns || at >= tiles ? -1 : GATED ? at / 2 + at % 2 * (tiles / 2) : at;
};

struct Slab { uint4 w[4], s, b; } slabs[DEPTH];
int load_turn = 0, load_slab = first_slab, load_tile = tile_of(0);
auto load = [&](Slab& to) {
  if (load_tile >= 0 && load_slab < end_slab) {
    const uint4* const from = reinterpret_cast<const uint4*>(w) + (size_t(load_tile) * SLABS + load_slab) * 144;
    for (int group = 0; group < 4; group++) to.w[group] = __ldcs(from + group * 32 + lane);
    to.s = __ldcs(from + 128 + g);
    to.b = __ldcs(from + 136 + g);
  }
  if (++load_slab == first_slab + STEPS) load_slab = first_slab, load_turn++, load_tile = tile_of(load_turn);
};
auto multiply = [](float (&d)[4], const unsigned (&a)[4], unsigned b_low, unsigned b_high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
};
auto low = [](unsigned two) { return __uint_as_float(two << 16); };
auto high = [](unsigned two) { return __uint_as_float(two & 0xffff0000u); };
auto rounded = [](float x) { return float(T(x)); };
auto pack = [](float low, float high) {
  unsigned two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
};
// A float in the shared memory of a block of the cluster.
auto remote = [](const float* at, int rank) {
#if __CUDA_ARCH__ >= 900
  unsigned address;
  float value;
  asm("{ .reg .u64 here; cvta.to.shared.u64 here, %1; cvt.u32.u64 %0, here; }" : "=r"(address) : "l"(at));
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
#else
  return *at;
#endif
};
auto sync_cluster = [] {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
};
// Where lanes 32 i to 32 i + 31 of a slab's inputs are stored: without bank conflicts when written and when read.
auto place_of = [](int row, int own_slab, int i) {
  const int half = i % 2;
  return row / 8 * FRAGMENTS + own_slab * 256 + (i / 8 * 2 + half) * 32 + ((row % 8 * 4 + i % 8 / 2) ^ half * 4);
};
// A lane's word has inputs 0 to 7; the low and high half of a register have inputs i and i + 4.
auto permuted = [](uint4 e) {
  return make_uint4(__byte_perm(e.x, e.z, 0x5410), __byte_perm(e.x, e.z, 0x7632), __byte_perm(e.y, e.w, 0x5410),
                    __byte_perm(e.y, e.w, 0x7632));
};

// The first weights do not depend on x.
#pragma unroll
for (int i = 0; i < DEPTH; i++) load(slabs[i]);
constexpr int RESULTS = TILES * (GATED ? 8 : 16), SHARE = RESULTS / CLUSTER;
const int width = GATED ? outputs / 2 : outputs;
for (int row = rows; row < ROWS; row++) {
  for (int own_slab = warp; own_slab < block_slabs; own_slab += WARPS) {
    fragments[place_of(row, own_slab, lane)] = make_uint4(0, 0, 0, 0);
  }
}
if (ADD) {
  for (int at = threadIdx.x; at < rows * SHARE; at += THREADS) {
    const int column = cluster * RESULTS + place * SHARE + at % SHARE;
    if (column >= width) continue;
    const T* const first = residual + size_t(first_row + at / SHARE) * width + column;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(first));
  }
}
// A warp reads pieces of x, a slab of a row each, and several at a time. Squares are added by slab and quarter, whatever
// the cluster.
const int pieces = rows * OWN_SLABS;
constexpr int BATCH = SETS == 1 ? 4 : 8;
for (int first = warp; first < pieces; first += WARPS * BATCH) {
  uint4 read[BATCH];
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const int piece = first + i * WARPS, row = piece / OWN_SLABS, own_slab = piece % OWN_SLABS;
    if (piece < pieces && own_slab < block_slabs) {
      read[i] = reinterpret_cast<const uint4*>(x + size_t(first_row + row) * K)[(block_slab + own_slab) * 32 + lane];
    }
  }
#pragma unroll
  for (int i = 0; i < BATCH; i++) {
    const int piece = first + i * WARPS, row = piece / OWN_SLABS, own_slab = piece % OWN_SLABS;
    if (piece >= pieces || own_slab >= block_slabs) continue;
    if (FORM == 1) {
      float sum = 0;
      auto add = [&](unsigned two) { sum += low(two) * low(two) + high(two) * high(two); };
      add(read[i].x), add(read[i].y), add(read[i].z), add(read[i].w);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) squares[row * SLABS + block_slab + own_slab] = sum;
    }
    fragments[place_of(row, own_slab, lane)] = permuted(read[i]);
  }
}
__shared__ float norms[ROWS];
if (FORM == 1) {
  sync_cluster();
  for (int at = threadIdx.x; at < ROWS * 4; at += THREADS) {
    const int row = at / 4, q = at % 4;
    float sum = 0;
    for (int slab = SLABS * q / 4; slab < SLABS * (q + 1) / 4; slab++) {
      const float* const square = squares + row * SLABS + slab;
      sum += CLUSTER == 1 ? *square : remote(square, q / QUARTERS);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (q == 0) norms[row] = rsqrtf(sum / K + __int_as_float(EPS));
  }
  __syncthreads();
  auto normed = [&](unsigned two, unsigned weight, float factor) {
    return pack(rounded(low(two) * factor) * low(weight), rounded(high(two) * factor) * high(weight));
  };
#pragma unroll 4
  for (int piece = warp; piece < pieces; piece += WARPS) {
    const int row = piece / OWN_SLABS, own_slab = piece % OWN_SLABS;
    if (own_slab >= block_slabs) continue;
    const uint4 weight = permuted(reinterpret_cast<const uint4*>(norm)[(block_slab + own_slab) * 32 + lane]);
    uint4& to = fragments[place_of(row, own_slab, lane)];
    const uint4 e = to;
    const float factor = norms[row];
    to = make_uint4(normed(e.x, weight.x, factor), normed(e.y, weight.y, factor), normed(e.z, weight.z, factor),
                    normed(e.w, weight.w, factor));
  }
}
__syncthreads();
#pragma unroll 4
for (int job = warp; job < SETS * block_slabs * 4; job += WARPS) {
  const unsigned ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  const int set = job / (block_slabs * 4), group = job % (block_slabs * 4);
  float sum[4] = {};
  for (int half = 0; half < 2; half++) {
    const uint4 b = fragments[set * FRAGMENTS + (group * 2 + half) * 32 + (lane ^ half * 4)];
    multiply(sum, ones, b.x, b.y);
    multiply(sum, ones, b.z, b.w);
  }
  if (g == 0) {
    *reinterpret_cast<float2*>(group_sums + group * ROWS + set * 8 + 2 * t) = make_float2(sum[0], sum[1]);
  }
}
__syncthreads();

float sum[SETS][4] = {};
int turn = 0, slab = first_slab;
while (turn < turns) {
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    if (turn >= turns) break;
    if (slab < end_slab) {
      const uint4* const own = fragments + (slab - block_slab) * 256;
      const float* const sums = group_sums + (slab - block_slab) * 4 * ROWS + 2 * t;
#pragma unroll
      for (int first_group = 0; first_group < 4; first_group += SIDE) {
        float d[SIDE][SETS][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int side = 0; side < SIDE; side++) {
            const int group = first_group + side;
            const uint4 four = slabs[i].w[group];
            unsigned a[2][4];
#pragma unroll
            for (int part = 0; part < 2; part++) {
              const unsigned first = (half ? four.y : four.x) >> (part * 8);
              const unsigned second = (half ? four.w : four.z) >> (part * 8);
              // Each number q becomes 128 + q in bfloat16.
              asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[part][0]) : "r"(first));
              asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[part][1]) : "r"(second));
              asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[part][2]) : "r"(first >> 4));
              asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[part][3]) : "r"(second >> 4));
            }
#pragma unroll
            for (int set = 0; set < SETS; set++) {
              const uint4 b = own[set * FRAGMENTS + (group * 2 + half) * 32 + (lane ^ half * 4)];
              multiply(d[side][set], a[0], b.x, b.y);
              multiply(d[side][set], a[1], b.z, b.w);
            }
          }
        }
#pragma unroll
        for (int side = 0; side < SIDE; side++) {
          const int group = first_group + side;
          float factor[2], offset[2];
          for (int half = 0; half < 2; half++) {
            const uint4 s = slabs[i].s, b = slabs[i].b;
            const unsigned s_two = half ? (group < 2 ? s.z : s.w) : (group < 2 ? s.x : s.y);
            const unsigned b_two = half ? (group < 2 ? b.z : b.w) : (group < 2 ? b.x : b.y);
            factor[half] = group % 2 ? high(s_two) : low(s_two);
            offset[half] = fmaf(-128.0f, factor[half], group % 2 ? high(b_two) : low(b_two));
          }
#pragma unroll
          for (int set = 0; set < SETS; set++) {
            const float2 x_sum = *reinterpret_cast<const float2*>(sums + group * ROWS + set * 8);
            const float (&now)[4] = d[side][set];
            float (&all)[4] = sum[set];
#pragma unroll
            for (int half = 0; half < 2; half++) {
              float &even = all[2 * half], &odd = all[2 * half + 1];
              even = fmaf(factor[half], now[2 * half], fmaf(offset[half], x_sum.x, even));
              odd = fmaf(factor[half], now[2 * half + 1], fmaf(offset[half], x_sum.y, odd));
            }
          }
        }
      }
    }
    load(slabs[i]);
    if (++slab < first_slab + STEPS) continue;
    slab = first_slab;
    // Two buffers in turn: a block may write the next turn's while others still read these.
    float* const buffer = partial + turn % 2 * PARTIAL;
    float* const own = buffer + warp / TILES * ROWS * STRIDE + warp % TILES * 16 + g;
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      for (int j = 0; j < 4; j++) {
        own[(set * 8 + 2 * t + j % 2) * STRIDE + j / 2 * 8] = sum[set][j];
        sum[set][j] = 0;
      }
    }
    sync_cluster();
    const int base = (turn * clusters + cluster) * RESULTS;
    auto value = [&](int row, int column) {
      float y = 0;
      for (int q = 0; q < 4; q++) {
        const float* const at = buffer + (q % QUARTERS * ROWS + row) * STRIDE + column;
        y += CLUSTER == 1 ? *at : remote(at, q / QUARTERS);
      }
      return y;
    };
    for (int at = threadIdx.x; at < rows * SHARE; at += THREADS) {
      const int row = at / SHARE, column = place * SHARE + at % SHARE;
      if (base + column >= width) continue;
      const size_t to = size_t(first_row + row) * width + base + column;
      if (GATED) {
        const int first = column / 16 * 32 + column % 16;
        const float gate = rounded(value(row, first)), up = rounded(value(row, first + 16));
        out[to] = T(rounded(gate * rounded(1 / (1 + expf(-gate)))) * up);
      } else {
        const float y = value(row, column);
        out[to] = ADD ? T(float(residual[to]) + rounded(y)) : T(y);
      }
    }
    turn++;
  }
}
// No block ends while another reads its memory.
if (CLUSTER > 1) sync_cluster();
