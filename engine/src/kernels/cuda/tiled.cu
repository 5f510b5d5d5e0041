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
// Constants: FORM, EPS (bits of the norm's epsilon), ADD, GATED, K (inputs, a multiple of 64), WARPS, CLUSTER (blocks: 1,
// 2 or 4), SETS (of 8 rows in a block), ALONE (1: there is one row, and no room for others), T (bfloat16). Numbers:
// outputs, all_rows. Further rows are further blocks along y, which read the weights from the cache.
constexpr int THREADS = 32 * WARPS, SLABS = (K + 255) / 256, ROWS = ALONE ? 1 : 8 * SETS, QUARTERS = 4 / CLUSTER;
// Tiles that a block computes at a time, and its part of the inputs.
constexpr int TILES = WARPS / QUARTERS, OWN_SLABS = (SLABS * QUARTERS + 3) / 4;
// Lanes that have a row as their column of mma, and x of a block in units of 8 inputs.
constexpr int COLUMN_LANES = ALONE ? 4 : 32, FRAGMENTS = OWN_SLABS * 8 * COLUMN_LANES;
// All quarters take as many steps; those with fewer slabs do nothing in the last one.
constexpr int STEPS = (SLABS + 3) / 4;
constexpr int STRIDE = TILES * 16 + 4, PARTIAL = QUARTERS * ROWS * STRIDE;
// Slabs of weights that are read ahead, and groups whose products do not wait for each other: with few rows there is
// little else to do, with many there are no registers left.
constexpr int DEPTH = SETS == 1 ? 2 : 1, SIDE = SETS == 1 ? 4 : SETS == 2 ? 2 : 1;
// Slabs after these that are read into the second-level cache while the kernels before still compute x.
constexpr int AHEAD = SETS == 1 ? 2 : 0;
extern __shared__ uint4 shared[];
// x in the order of mma's second operand, [SETS][OWN_SLABS][4 groups][2][COLUMN_LANES].
uint4* const fragments = shared;
// Sums of x over a group, [OWN_SLABS * 4][ROWS].
float* const group_sums = reinterpret_cast<float*>(shared + SETS * FRAGMENTS);
// Sums of squares of x over a slab, [ROWS][SLABS].
float* const squares = group_sums + OWN_SLABS * 4 * ROWS;
// The norm in the order of the fragments of a row, [OWN_SLABS][32]. With more rows there may be no room for it.
uint4* const norm_weights = reinterpret_cast<uint4*>(squares + (FORM == 1 ? (ROWS * SLABS + 3) / 4 * 4 : 0));
// Sums of the quarters of this block, for this turn and the last one, [2][QUARTERS][ROWS][STRIDE].
float* const partial = reinterpret_cast<float*>(norm_weights + (FORM == 1 && ALONE ? OWN_SLABS * 32 : 0));

const int cluster = blockIdx.x / CLUSTER, place = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER;
const int first_row = ROWS * int(blockIdx.y);
const int rows = min(ROWS, all_rows - first_row);
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
const int quarter = place * QUARTERS + warp / TILES;
const int first_slab = SLABS * quarter / 4, end_slab = SLABS * (quarter + 1) / 4;
const int block_slab = SLABS * place / CLUSTER, block_slabs = SLABS * (place + 1) / CLUSTER - block_slab;
// Lanes of the warps that add up squares.
constexpr unsigned SHUFFLED = ALONE ? 15 : ~0u;
const int tiles = (outputs + 15) / 16, turns = (tiles + TILES * clusters - 1) / (TILES * clusters);
// The tile of this warp in a turn; -1 if there is none. A gate's tile is beside its up's.
auto tile_of = [&](int turn) {
  const int at = (turn * clusters + cluster) * TILES + warp % TILES;
  return turn >= turns || at >= tiles ? -1 : GATED ? at / 2 + at % 2 * (tiles / 2) : at;
};

struct Slab { uint4 w[4], s, b; } slabs[DEPTH];
// A slab's place in the order in which this warp multiplies them.
struct Place { int turn, slab, tile; } next{0, first_slab, tile_of(0)};
auto address = [&](const Place& at) {
  return at.tile >= 0 && at.slab < end_slab
      ? reinterpret_cast<const uint4*>(w) + (size_t(at.tile) * SLABS + at.slab) * 144
      : nullptr;
};
auto advance = [&](Place& at) {
  if (++at.slab == first_slab + STEPS) at.slab = first_slab, at.turn++, at.tile = tile_of(at.turn);
};
auto load = [&](Slab& to) {
  if (const uint4* const from = address(next)) {
    for (int group = 0; group < 4; group++) to.w[group] = __ldcs(from + group * 32 + lane);
    to.s = __ldcs(from + 128 + g);
    to.b = __ldcs(from + 136 + g);
  }
  advance(next);
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
// Where lanes 32 i to 32 i + 31 of a slab's inputs are stored: without bank conflicts when written and when read.
auto place_of = [](int row, int own_slab, int i) {
  const int half = i % 2, column_lane = row % 8 * 4 + i % 8 / 2;
  return row / 8 * FRAGMENTS + (own_slab * 8 + i / 8 * 2 + half) * COLUMN_LANES
      + (ALONE ? column_lane : column_lane ^ half * 4);
};
// A lane's word has inputs 0 to 7; the low and high half of a register have inputs i and i + 4.
auto permuted = [](uint4 e) {
  return make_uint4(__byte_perm(e.x, e.z, 0x5410), __byte_perm(e.x, e.z, 0x7632), __byte_perm(e.y, e.w, 0x5410),
                    __byte_perm(e.y, e.w, 0x7632));
};

// The first weights do not depend on x.
#pragma unroll
for (int i = 0; i < DEPTH; i++) load(slabs[i]);
Place later = next;
for (int i = 0; i < AHEAD; i++) {
  // A slab has 18 lines of the cache.
  const uint4* const from = address(later);
  if (from && lane < 18) prefetch(from + lane * 8);
  advance(later);
}
for (int row = rows; row < ROWS; row++) {
  for (int own_slab = warp; own_slab < block_slabs; own_slab += WARPS) {
    fragments[place_of(row, own_slab, lane)] = make_uint4(0, 0, 0, 0);
  }
}
// A lane's 8 inputs of a slab of a row; zeros after the last input.
auto inputs_at = [&](const T* row, int own_slab) {
  const int at = (block_slab + own_slab) * 32 + lane;
  return K % 256 == 0 || at < K / 8 ? reinterpret_cast<const uint4*>(row)[at] : make_uint4(0, 0, 0, 0);
};
auto norm_at = [&](int own_slab) { return permuted(inputs_at(norm, own_slab)); };
if (FORM == 1 && ALONE) {
  for (int own_slab = warp; own_slab < block_slabs; own_slab += WARPS) {
    norm_weights[own_slab * 32 + lane] = norm_at(own_slab);
  }
}
wait_for_inputs();
constexpr int RESULTS = TILES * (GATED ? 8 : 16), SHARE = RESULTS / CLUSTER;
const int width = GATED ? outputs / 2 : outputs;
if (ADD) {
  for (int at = threadIdx.x; at < rows * SHARE; at += THREADS) {
    const int column = cluster * RESULTS + place * SHARE + at % SHARE;
    if (column >= width) continue;
    const T* const first = residual + size_t(first_row + at / SHARE) * width + column;
    asm volatile("prefetch.global.L1 [%0];" ::"l"(first));
  }
}
// Stores 8 inputs of a row and, in one lane of 8, the sum of a group's inputs.
auto store = [&](int row, int own_slab, uint4 e) {
  fragments[place_of(row, own_slab, lane)] = e;
  float sum = ((low(e.x) + high(e.x)) + (low(e.y) + high(e.y))) + ((low(e.z) + high(e.z)) + (low(e.w) + high(e.w)));
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane % 8 == 0) group_sums[(own_slab * 4 + lane / 8) * ROWS + row] = sum;
};
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
      read[i] = inputs_at(x + size_t(first_row + row) * K, own_slab);
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
      fragments[place_of(row, own_slab, lane)] = permuted(read[i]);
    } else {
      store(row, own_slab, permuted(read[i]));
    }
  }
}
__shared__ float norms[ROWS];
if (FORM == 1) {
  sync_cluster<CLUSTER>();
  for (int at = threadIdx.x; at < ROWS * 4; at += THREADS) {
    const int row = at / 4, q = at % 4;
    float sum = 0;
    for (int slab = SLABS * q / 4; slab < SLABS * (q + 1) / 4; slab++) {
      const float* const square = squares + row * SLABS + slab;
      sum += remote<CLUSTER>(square, q / QUARTERS);
    }
    sum += __shfl_xor_sync(SHUFFLED, sum, 1);
    sum += __shfl_xor_sync(SHUFFLED, sum, 2);
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
    const uint4 weight = ALONE ? norm_weights[own_slab * 32 + lane] : norm_at(own_slab);
    const uint4 e = fragments[place_of(row, own_slab, lane)];
    const float factor = norms[row];
    store(row, own_slab, make_uint4(normed(e.x, weight.x, factor), normed(e.y, weight.y, factor),
                                    normed(e.z, weight.z, factor), normed(e.w, weight.w, factor)));
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
      const uint4* const own = fragments + (slab - block_slab) * 8 * COLUMN_LANES;
      const float* const sums = group_sums + (slab - block_slab) * 4 * ROWS + (ALONE ? 0 : 2 * t);
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
              uint4 b = make_uint4(0, 0, 0, 0);
              if (!ALONE || g == 0) {
                b = own[set * FRAGMENTS + (group * 2 + half) * COLUMN_LANES + (ALONE ? lane : lane ^ half * 4)];
              }
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
            // The columns of lanes that have no row are not stored.
            const float* const at = sums + group * ROWS + set * 8;
            const float2 x_sum = ALONE ? make_float2(*at, 0) : *reinterpret_cast<const float2*>(at);
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
        const int row = set * 8 + 2 * t + j % 2;
        if (row < ROWS) own[row * STRIDE + j / 2 * 8] = sum[set][j];
        sum[set][j] = 0;
      }
    }
    sync_cluster<CLUSTER>();
    const int base = (turn * clusters + cluster) * RESULTS;
    auto value = [&](int row, int column) {
      float y = 0;
      for (int q = 0; q < 4; q++) {
        const float* const at = buffer + (q % QUARTERS * ROWS + row) * STRIDE + column;
        y += remote<CLUSTER>(at, q / QUARTERS);
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
if (CLUSTER > 1) sync_cluster<CLUSTER>();
