// Products of a few rows with a packed matrix: against f64, beside runs of one row, and beside our
// CUDA kernel.
#include "metal.cuh"

#define inline __device__ inline
#include "../../src/kernels/metal/affine.metal"
#undef inline

template <class T, int N, int K, int ROWS, int BITS, int GROUP>
__global__ void metal_kernel(const T* x, const unsigned* words, const T* scales, const T* biases,
                             T* y) {
#include BODY
}

// As `Tiled::block_with` of tiled.rs divides a matrix for fewer than 9 rows.
template <int N, int K, int WARPS_> struct Tiles {
  static constexpr int SLABS = (K + 255) / 256, COUNT = (N + 15) / 16, EACH = WARPS_ / 4,
                       GROUPS = (COUNT + EACH - 1) / EACH;
  static constexpr int TURNS = (GROUPS + 131) / 132, BLOCKS = (GROUPS + TURNS - 1) / TURNS;
  static constexpr int FLOATS = SLABS * 32 + (TURNS < 2 ? TURNS : 2) * 32 * (EACH * 16 + 4) + 8;
  static constexpr int SHARED_BYTES = 8 * SLABS * 512 + FLOATS * 4, WORDS = 576;
};

template <int N_, int K, int WARPS> __global__ void __launch_bounds__(32 * WARPS)
    cuda_kernel(const bf16* x, const unsigned* w, const bf16* norm, const bf16* residual, bf16* out,
                int outputs, int all_rows) {
  using T = bf16;
  constexpr int FORM = 0, EPS = EPSILON, ADD = 0, GATED = 0, CLUSTER = 1, SETS = 1, ALONE = 0;
#include "../../src/kernels/cuda/tiled.cu"
}

// Several matrices, so that a launch does not find its own in the cache.
template <class T, int N, int K, int BITS, int GROUP> struct Case {
  static constexpr size_t WORDS = size_t(N) * K * BITS / 32, SCALES = size_t(N) * K / GROUP;
  int matrices;
  T *x, *scales, *biases, *y;
  unsigned* words;

  Case(int matrices) : matrices(matrices) {
    x = array<T>(8 * K), words = array<unsigned>(matrices * WORDS),
    y = array<T>(size_t(8) * N, false);
    scales = array<T>(matrices * SCALES), biases = array<T>(matrices * SCALES);
  }

  template <int ROWS> void launch(int number) {
    const int i = number % matrices;
    metal_kernel<T, N, K, ROWS, BITS, GROUP><<<dim3(1, (N + 7) / 8), 64>>>(
        x, words + i * WORDS, scales + i * SCALES, biases + i * SCALES, y);
  }

  // The outputs of the first matrix.
  Worst compare(int rows) const {
    Worst worst;
    for (int row = 0; row < rows; row++) {
      for (int n = 0; n < N; n++) {
        double sum = 0;
        for (int k = 0; k < K; k++) {
          const size_t bit = (size_t(n) * K + k) * BITS;
          unsigned long long two = words[bit / 32];
          if (bit % 32 + BITS > 32) two |= (unsigned long long)(words[bit / 32 + 1]) << 32;
          const unsigned q = unsigned(two >> bit % 32) & ((1u << BITS) - 1);
          const size_t group = size_t(n) * (K / GROUP) + k / GROUP;
          sum += (double(q) * wide(scales[group]) + wide(biases[group])) * wide(x[row * K + k]);
        }
        worst.note(wide(y[size_t(row) * N + n]), sum);
      }
    }
    return worst;
  }

  template <int ROWS> void check_rows(const char* name, double bound) {
    memset(y, 0xff, size_t(8) * N * sizeof(T));
    launch<ROWS>(0);
    finish();
    char title[100];
    snprintf(title, sizeof title, "packed_rows, %s, %d x %d, %d bits in groups of %d, %d rows",
             name, N, K, BITS, GROUP, ROWS);
    check(title, compare(ROWS).relative(), bound);
  }
};

template <class T> void check_widths(const char* name, double bound) {
  Case<T, 203, 640, 2, 64>(1).template check_rows<4>(name, bound);
  Case<T, 203, 640, 3, 32>(1).template check_rows<5>(name, bound);
  Case<T, 21, 640, 4, 128>(1).template check_rows<2>(name, bound);
  Case<T, 8, 32, 4, 32>(1).template check_rows<8>(name, bound);
  Case<T, 203, 640, 5, 64>(1).template check_rows<8>(name, bound);
  Case<T, 203, 640, 6, 64>(1).template check_rows<3>(name, bound);
  Case<T, 203, 640, 8, 32>(1).template check_rows<7>(name, bound);
}

// Words, scales and biases in tiles, as `Tiled::new` of tiled.rs orders them.
template <int N, int K, int WARPS> unsigned* tiles_of(const Case<bf16, N, K, 4, 64>& c) {
  using Order = Tiles<N, K, WARPS>;
  static_assert(N % 16 == 0 && K % 256 == 0, "whole tiles");
  constexpr size_t MATRIX = size_t(Order::COUNT) * Order::SLABS * Order::WORDS;
  unsigned* const tiles = array<unsigned>(c.matrices * MATRIX, false);
  for (int i = 0; i < c.matrices; i++) {
    for (size_t at = 0; at < size_t(N) * (K / 8); at++) {
      const int row = int(at / (K / 8)), word = int(at % (K / 8)), half = row % 16 / 8, g = row % 8;
      unsigned* const to =
          tiles + i * MATRIX + (size_t(row / 16) * Order::SLABS + word / 32) * Order::WORDS;
      const int group = word % 32 / 8, t = word % 8 / 2;
      to[((group * 8 + g) * 4 + t) * 4 + half * 2 + word % 2] = c.words[i * c.WORDS + at];
      if (word % 8 > 0) continue;
      bf16* const factors = reinterpret_cast<bf16*>(to + 512);
      const size_t from = i * c.SCALES + size_t(row) * (K / 64) + word / 8;
      factors[(g * 2 + half) * 4 + group] = c.scales[from],
                                   factors[64 + (g * 2 + half) * 4 + group] = c.biases[from];
    }
  }
  return tiles;
}

template <int N, int K, int WARPS> void compare_times() {
  using Order = Tiles<N, K, WARPS>;
  constexpr size_t MATRIX = size_t(Order::COUNT) * Order::SLABS * Order::WORDS;
  Case<bf16, N, K, 4, 64> c(int(256e6 / (double(N) * K / 2)) + 1);
  const unsigned* const tiles = tiles_of<N, K, WARPS>(c);
  cudaFuncSetAttribute(cuda_kernel<N, K, WARPS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       Order::SHARED_BYTES);
  auto own = [&](int i) {
    cuda_kernel<N, K, WARPS><<<Order::BLOCKS, 32 * WARPS, Order::SHARED_BYTES>>>(
        c.x, tiles + i % c.matrices * MATRIX, nullptr, nullptr, c.y, N, 4);
  };
  char title[100];
  snprintf(title, sizeof title, "CUDA's text, bf16, %d x %d in groups of 64, 4 rows", N, K);
  own(0);
  finish();
  check(title, c.compare(4).relative(), 1e-2);
  const double four = microseconds([&](int i) { c.template launch<4>(i); });
  const double alone = microseconds([&](int i) {
    for (int row = 0; row < 4; row++) c.template launch<1>(i);
  });
  const double cuda = microseconds(own);
  printf(
      "packed_rows, %d x %d, bf16, 4 rows: Metal's text %.1f us, 4 times with one row %.1f us, "
      "CUDA's %.1f us: %.0f %%\n",
      N, K, four, alone, cuda, 100 * cuda / four);
}

template <int BITS> void time_width() {
  Case<bf16, 4096, 4096, BITS, 64> c(32);
  const double one = microseconds([&](int i) { c.template launch<1>(i); });
  const double four = microseconds([&](int i) { c.template launch<4>(i); });
  const double eight = microseconds([&](int i) { c.template launch<8>(i); });
  printf("packed_rows, 4096 x 4096, bf16, %d bits: 1 row %.1f us, 4 rows %.1f us, 8 rows %.1f us\n",
         BITS, one, four, eight);
}

int main() {
#ifdef RACES
  Case<float, 21, 320, 4, 64> c(1);
  c.launch<3>(0);
  finish();
#else
  check_widths<float>("f32", 1e-5);
  check_widths<bf16>("bf16", 1e-2);
  compare_times<4096, 4096, 8>();
  compare_times<12288, 4096, 12>();
  time_width<6>();
  time_width<8>();
#endif
  return all_hold ? 0 : 1;
}
