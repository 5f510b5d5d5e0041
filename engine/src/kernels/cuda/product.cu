// Products of few rows with a matrix of 4 bits in groups of 64, in MLX's layout, on tensor cores. A block
// computes 16 outputs at a time; its warps divide the inputs in slabs of 256 and add their sums at the end.
// Columns of mma do not mix, and the sums are the same PARTS for any number of sets and warps, so that a row's
// bits do not depend on the other rows.
//
// The rows can be normed while they are read, and added to others when they are written: FORM is 0 for rows as they are
// and 1 for RMS norm by `norm`; ADD is 1 to add `residual`. Results are rounded where the separate operations round.
//
// Constants: FORM, EPS (bits of the norm's epsilon), ADD, K (inputs, a multiple of 256), WARPS, PARTS (WARPS, or one for each slab), SETS (of 8 rows in a
// block), T (bfloat16). Numbers: outputs, all_rows. Further rows are further blocks along y, which read the weights from the cache.
constexpr int THREADS = 32 * WARPS, SLABS = K / 256, DEPTH = 3, ITEMS = (SLABS + WARPS - 1) / WARPS;
constexpr int FRAGMENTS = K / 16 * 32, SUMS = K / 64 * 8, PARTIAL = PARTS * 128 * SETS;
extern __shared__ uint2 shared[];
// x in the order of mma's second operand: for each set and 16 inputs, 4 of one row for each lane.
uint2* const fragments = shared;
// Sums of x over a group, for the 8 rows of each set.
float* const group_sums = reinterpret_cast<float*>(shared + SETS * FRAGMENTS);
float* const partial = group_sums + SETS * SUMS;

const int first_row = 8 * SETS * int(blockIdx.y);
const int rows = min(8 * SETS, all_rows - first_row);
const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
const uint2* const words = reinterpret_cast<const uint2*>(w);
const uint2* const factors = reinterpret_cast<const uint2*>(scales);
const uint2* const offsets = reinterpret_cast<const uint2*>(biases);

// Words, factors and offsets of a slab for rows g and g + 8 of a tile.
struct Slab { uint2 w[2][4], s[2], b[2]; } slabs[DEPTH];
const int tiles = outputs / 16, step = gridDim.x;
const int own = (tiles - int(blockIdx.x) + step - 1) / step * ITEMS;
auto load = [&](int item, Slab& to) {
  const int tile = blockIdx.x + item / ITEMS * step, slab = warp + item % ITEMS * WARPS;
  if (item >= own || slab >= SLABS) return;
  for (int half = 0; half < 2; half++) {
    const size_t row = size_t(tile) * 16 + half * 8 + g;
    for (int group = 0; group < 4; group++) {
      to.w[half][group] = __ldcs(words + row * (K / 16) + slab * 16 + group * 4 + t);
    }
    to.s[half] = factors[row * SLABS + slab];
    to.b[half] = offsets[row * SLABS + slab];
  }
};
auto multiply = [](float (&d)[4], const unsigned (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
};
// The first weights do not depend on x.
#pragma unroll
for (int i = 0; i < DEPTH; i++) load(i, slabs[i]);

auto chunks_of = [&](int n) { return reinterpret_cast<const uint4*>(x + size_t(first_row + n) * K); };
auto low = [](unsigned two) { return __uint_as_float(two << 16); };
auto high = [](unsigned two) { return __uint_as_float(two & 0xffff0000u); };
auto rounded = [](float x) { return float(T(x)); };
auto pack = [](float low, float high) {
  unsigned two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
};
__shared__ float squares[8 * SETS][8], norms[8 * SETS];
if (FORM == 1) {
  // Always eight sums, so that they do not depend on the number of warps.
  for (int item = warp; item < rows * 8; item += WARPS) {
    float sum = 0;
    for (int i = lane; i < K / 64; i += 32) {
      const uint4 eight = chunks_of(item / 8)[item % 8 * (K / 64) + i];
      auto add = [&](unsigned two) { sum += low(two) * low(two) + high(two) * high(two); };
      add(eight.x), add(eight.y), add(eight.z), add(eight.w);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) squares[item / 8][item % 8] = sum;
  }
  __syncthreads();
  if (threadIdx.x < rows) {
    float sum = 0;
    for (int part = 0; part < 8; part++) sum += squares[threadIdx.x][part];
    norms[threadIdx.x] = rsqrtf(sum / K + __int_as_float(EPS));
  }
  __syncthreads();
}
auto normed = [&](unsigned two, unsigned weight, float factor) {
  return pack(rounded(low(two) * factor) * low(weight), rounded(high(two) * factor) * high(weight));
};
for (int i = threadIdx.x; i < rows * (K / 8); i += THREADS) {
  const int n = i / (K / 8), chunk = i % (K / 8);
  uint4 eight = chunks_of(n)[chunk];
  if (FORM == 1) {
    const uint4 weight = reinterpret_cast<const uint4*>(norm)[chunk];
    const float factor = norms[n];
    eight = make_uint4(normed(eight.x, weight.x, factor), normed(eight.y, weight.y, factor),
                       normed(eight.z, weight.z, factor), normed(eight.w, weight.w, factor));
  }
  // A lane's word has inputs 0 to 7; the low and high half of a register have inputs i and i + 4.
  uint2* const to = fragments + n / 8 * FRAGMENTS + (chunk / 8 * 4 + chunk % 2 * 2) * 32 + n % 8 * 4 + chunk % 8 / 2;
  to[0] = make_uint2(__byte_perm(eight.x, eight.z, 0x5410), __byte_perm(eight.x, eight.z, 0x7632));
  to[32] = make_uint2(__byte_perm(eight.y, eight.w, 0x5410), __byte_perm(eight.y, eight.w, 0x7632));
}
__syncthreads();
const uint2 zero = make_uint2(0, 0);
for (int group = warp; group < SETS * (K / 64); group += WARPS) {
  const unsigned ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  float sum[4] = {};
  for (int i = 0; i < 4; i++) {
    multiply(sum, ones, group / (K / 64) * 8 + g < rows ? fragments[(group * 4 + i) * 32 + lane] : zero);
  }
  if (g == 0) {
    group_sums[group * 8 + 2 * t] = sum[0];
    group_sums[group * 8 + 2 * t + 1] = sum[1];
  }
}
__syncthreads();

float sum[SETS][4] = {};
for (int next = 0; next < own; next += DEPTH) {
#pragma unroll
  for (int i = 0; i < DEPTH; i++) {
    const int item = next + i, slab = warp + item % ITEMS * WARPS;
    if (item >= own) break;
    if (slab < SLABS) {
      const Slab& now = slabs[i];
#pragma unroll
      for (int group = 0; group < 4; group++) {
        float d[SETS][4] = {};
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const unsigned first = (part < 2 ? now.w[0][group].x : now.w[0][group].y) >> (part % 2 * 8);
          const unsigned second = (part < 2 ? now.w[1][group].x : now.w[1][group].y) >> (part % 2 * 8);
          // Each number q becomes 128 + q in bfloat16.
          unsigned a[4];
          asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[0]) : "r"(first));
          asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[1]) : "r"(second));
          asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[2]) : "r"(first >> 4));
          asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(a[3]) : "r"(second >> 4));
#pragma unroll
          for (int set = 0; set < SETS; set++) {
            const uint2* const own_fragments = fragments + set * FRAGMENTS;
            multiply(d[set], a, set * 8 + g < rows ? own_fragments[((slab * 4 + group) * 4 + part) * 32 + lane] : zero);
          }
        }
        for (int half = 0; half < 2; half++) {
          const unsigned s = group < 2 ? now.s[half].x : now.s[half].y, b = group < 2 ? now.b[half].x : now.b[half].y;
          const float factor = __uint_as_float(group % 2 ? s & 0xffff0000u : s << 16);
          const float offset = fmaf(-128.0f, factor, __uint_as_float(group % 2 ? b & 0xffff0000u : b << 16));
#pragma unroll
          for (int set = 0; set < SETS; set++) {
            const float2* const sums = reinterpret_cast<const float2*>(group_sums + set * SUMS);
            const float2 x_sum = sums[(slab * 4 + group) * 4 + t];
            sum[set][2 * half] = fmaf(factor, d[set][2 * half], fmaf(offset, x_sum.x, sum[set][2 * half]));
            sum[set][2 * half + 1] = fmaf(factor, d[set][2 * half + 1], fmaf(offset, x_sum.y, sum[set][2 * half + 1]));
          }
        }
      }
    }
    load(item + DEPTH, slabs[i]);
    const bool last = item % ITEMS == ITEMS - 1;
    // Two buffers in turn: a warp may write the next tile's while others still read these.
    float* const buffer = partial + item / ITEMS % 2 * PARTIAL;
    if ((last && PARTS == WARPS) || (slab < SLABS && PARTS > WARPS)) {
      const int part = PARTS == WARPS ? warp : slab;
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        for (int half = 0; half < 2; half++) {
          for (int odd = 0; odd < 2; odd++) {
            buffer[part * (128 * SETS) + (set * 8 + 2 * t + odd) * 16 + half * 8 + g] = sum[set][2 * half + odd];
            sum[set][2 * half + odd] = 0;
          }
        }
      }
    }
    if (last) {
      const int tile = blockIdx.x + item / ITEMS * step;
      __syncthreads();
      for (int at = threadIdx.x; at < rows * 16; at += THREADS) {
        float y = 0;
        for (int part = 0; part < PARTS; part++) y += buffer[part * (128 * SETS) + at];
        const size_t to = size_t(first_row + at / 16) * outputs + tile * 16 + at % 16;
        out[to] = ADD ? T(float(residual[to]) + rounded(y)) : T(y);
      }
    }
  }
}
