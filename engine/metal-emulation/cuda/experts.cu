// The Metal texts of experts and of products of few rows as CUDA kernels, and our CUDA kernels of
// experts beside them. See run.sh.

#include "metal.cuh"

#include "affine.metal"

template <class T, int N, int K, int ROWS, int BITS, int GROUP>
__global__ void packed_rows(const T* x, const uint* words, const T* scales, const T* biases, T* y) {
#include "packed_rows.metal"
}

#define GATE_PRODUCT(at, inputs, total) \
  product<BITS>(gate, gate_scales, gate_biases, (at) / 8, (at) / GROUP, inputs, total)
template <class T, int E, int D, int TOP_K, int BITS, int GROUP>
__global__ void choose(const T* scores, const T* x, const uint* gate, const T* gate_scales,
                       const T* gate_biases, T* shares, uint* chosen, T* shared_gate) {
  constexpr int NORMED = 1, SCALE = 0x3f800000;
#include "choose.metal"
}

template <class T, int D, int F, int TOP_K, int BITS, int GROUP>
__global__ void gate_up(const T* x, const uint* chosen, const uint* gate, const T* gate_scales,
                        const T* gate_biases, const uint* up, const T* up_scales,
                        const T* up_biases, T* mid) {
#include "experts_gate_up.metal"
}

#define SHARED_EXPERT(i) \
  ROUNDED(static_cast<float>(shared[i]) * static_cast<float>(shared_gate[row]))
template <class T, int D, int F, int TOP_K, int BITS, int GROUP>
__global__ void down_sum(const T* mid, const uint* chosen, const T* shares, const T* residual,
                         const uint* down, const T* down_scales, const T* down_biases,
                         const T* shared, const T* shared_gate, T* out) {
#include DOWN
}

template <int E, int D, int TOP_K>
__global__ void __launch_bounds__(256)
    cuda_choose(const bf16* scores, const bf16* x, const bf16* norm, const uint* gate,
                const bf16* gate_scales, const bf16* gate_biases, uint* chosen, bf16* shares,
                bf16* shared_gate) {
  typedef bf16 T;
  constexpr int NORMED = 1, SCALE = 0x3f800000, EPS = 0x358637bd, GATE = 8, THREADS = 256;
#include "../../src/kernels/cuda/choose.cu"
}
template <int D, int F, int TOP_K>
__global__ void __launch_bounds__(256)
    cuda_gate_up(const bf16* x, const bf16* norm, const uint* chosen, const uint* gate,
                 const bf16* gate_scales, const bf16* gate_biases, const uint* up,
                 const bf16* up_scales, const bf16* up_biases, bf16* out) {
  typedef bf16 T;
  constexpr int EPS = 0x358637bd, WARPS = 8;
#include "../../src/kernels/cuda/experts_gate_up.cu"
}
#undef SHARED
template <int D, int F, int TOP_K>
__global__ void __launch_bounds__(256)
    cuda_down(const bf16* mid, const uint* chosen, const bf16* shares, const uint* down,
              const bf16* scales, const bf16* biases, const bf16* shared, const bf16* shared_gate,
              const bf16* residual, bf16* out) {
  typedef bf16 T;
  constexpr int SHARED = 2, WARPS = 8;
#include "../../src/kernels/cuda/experts_down.cu"
}

// A stack of `count` packed matrices.
template <class T>
struct Stack {
  int outputs, inputs, bits, group;
  uint* words;
  T *scales, *biases;

  Stack(size_t count, int outputs, int inputs, int bits, int group)
      : outputs(outputs), inputs(inputs), bits(bits), group(group) {
    const size_t all = count * outputs * inputs;
    words = array<uint>(all * bits / 32), scales = array<T>(all / group),
    biases = array<T>(all / group);
    // Numbers of both signs and of one size in all widths.
    for (size_t i = 0; i < all / group; i++) {
      const float scale = (0.5f + fabsf(random_float())) * 0.1f / (1 << bits);
      set(scales[i], scale), set(biases[i], -scale * ((1 << bits) - 1) / 2);
    }
  }

  double weight(size_t row, int i) const {
    const size_t bit = (row * inputs + i) * bits;
    unsigned long long two = words[bit / 32];
    if (bit % 32 + bits > 32) two |= (unsigned long long)(words[bit / 32 + 1]) << 32;
    const unsigned number = unsigned(two >> bit % 32) & ((1u << bits) - 1);
    const size_t at = row * (inputs / group) + i / group;
    return number * double(wide(scales[at])) + wide(biases[at]);
  }

  template <class X>
  double product(size_t row, const X* x) const {
    double sum = 0;
    for (int i = 0; i < inputs; i++) sum += weight(row, i) * wide(x[i]);
    return sum;
  }
};

// The largest difference over the largest value.
struct Difference {
  double off = 0, most = 0;
  void note(double ours, double right) {
    most = fmax(most, fabs(right));
    off = std::isnan(ours) ? INFINITY : fmax(off, fabs(ours - right));
  }
  double relative() const { return off / most; }
};

static bool report(const char* what, const char* type, int bits, int group, double worst,
                   double bound) {
  const bool holds = cudaDeviceSynchronize() == 0 && worst < bound;
  printf("%-11s %s, %d bits in groups of %3d: %.1e%s\n", what, type, bits, group, worst,
         holds ? "" : "  WRONG");
  return holds;
}

template <class T, int ROWS, int BITS, int GROUP>
static bool check_product(const char* type, double bound) {
  constexpr int N = 203, K = 640;
  Stack<T> weight(1, N, K, BITS, GROUP);
  T *x = array<T>(ROWS * K), *y = array<T>(ROWS * N, false);
  packed_rows<T, N, K, ROWS, BITS, GROUP>
      <<<dim3(1, (N + 7) / 8), 64>>>(x, weight.words, weight.scales, weight.biases, y);
  cudaDeviceSynchronize();
  Difference all;
  for (int r = 0; r < ROWS; r++) {
    for (int o = 0; o < N; o++) all.note(wide(y[r * N + o]), weight.product(o, x + r * K));
  }
  return report("product", type, BITS, GROUP, all.relative(), bound);
}

// A block of experts with a shared one.
template <class T, int E, int D, int F, int TOP_K, int BITS, int GROUP>
struct Block {
  int rows;
  Stack<T> gate{E, F, D, BITS, GROUP}, up{E, F, D, BITS, GROUP}, down{E, D, F, BITS, GROUP},
      gate_of_shared{1, 1, D, 8, 64};
  T *scores, *x, *norm, *shares, *shared_gate, *mid, *shared, *residual, *out;
  uint* chosen;

  // For `rows` rows, and as many more of experts as times need.
  Block(int rows) : rows(rows) {
    scores = array<T>(rows * E), x = array<T>(rows * D), norm = array<T>(D),
    residual = array<T>(rows * D);
    shares = array<T>(rows * TOP_K), shared_gate = array<T>(rows), mid = array<T>(rows * TOP_K * F),
    shared = array<T>(rows * D);
    out = array<T>(rows * D), chosen = array<uint>(64 * rows * TOP_K);
    for (int i = 0; i < 64 * rows * TOP_K; i++) chosen[i] %= E;
    for (int i = 0; i < rows * E; i++) set(scores[i], wide(scores[i]) * 4);
  }

  void choose_experts() {
    choose<T, E, D, TOP_K, 8, 64>
        <<<dim3(1, rows), 64>>>(scores, x, gate_of_shared.words, gate_of_shared.scales,
                                gate_of_shared.biases, shares, chosen, shared_gate);
  }
  void compute_mid(const uint* chosen) {
    gate_up<T, D, F, TOP_K, BITS, GROUP><<<dim3(1, F / 4, rows * TOP_K), 64>>>(
        x, chosen, gate.words, gate.scales, gate.biases, up.words, up.scales, up.biases, mid);
  }
  void compute_out(const uint* chosen) {
    down_sum<T, D, F, TOP_K, BITS, GROUP>
        <<<dim3(1, D / 4, rows), 32 * TOP_K>>>(mid, chosen, shares, residual, down.words,
                                               down.scales, down.biases, shared, shared_gate, out);
  }

  bool check(const char* type, double bound) {
    choose_experts(), compute_mid(chosen), compute_out(chosen);
    cudaDeviceSynchronize();
    Difference choice, mids, outs;
    for (int r = 0; r < rows; r++) {
      const double g = gate_of_shared.product(0, x + r * D), factor = 1 / (1 + exp(-g));
      choice.note(wide(shared_gate[r]), factor);
      double all = 0;
      std::vector<bool> is_chosen(E);
      for (int k = 0; k < TOP_K; k++) {
        const uint e = chosen[r * TOP_K + k];
        all += exp(wide(scores[r * E + e])), is_chosen[e] = true;
      }
      double least = INFINITY, next = -INFINITY;
      for (int e = 0; e < E; e++) {
        const double score = wide(scores[r * E + e]);
        if (is_chosen[e])
          least = fmin(least, score);
        else
          next = fmax(next, score);
      }
      // Scores that are nearly equal have one probability in 16 bits.
      if (least < next - 0.02) choice.note(INFINITY, 0);
      std::vector<double> y(D);
      for (int k = 0; k < TOP_K; k++) {
        const int pair = r * TOP_K + k;
        const size_t e = chosen[pair];
        const double share = exp(wide(scores[r * E + e])) / all;
        choice.note(wide(shares[pair]), share);
        for (int f = 0; f < F; f++) {
          const double a = gate.product(e * F + f, x + r * D), b = up.product(e * F + f, x + r * D);
          mids.note(wide(mid[pair * F + f]), a / (1 + exp(-a)) * b);
        }
        for (int d = 0; d < D; d++) y[d] += share * down.product(e * D + d, mid + pair * F);
      }
      for (int d = 0; d < D; d++) {
        const double right = wide(residual[r * D + d]) + y[d] + wide(shared[r * D + d]) * factor;
        outs.note(wide(out[r * D + d]), right);
      }
    }
    bool right = report("choice", type, BITS, GROUP, choice.relative(), bound);
    right &= report("gates, ups", type, BITS, GROUP, mids.relative(), bound);
    return right & report("downs", type, BITS, GROUP, outs.relative(), bound);
  }
};

template <class T>
static bool check(const char* type, double bound) {
  bool right = check_product<T, 4, 2, 64>(type, bound) & check_product<T, 5, 3, 32>(type, bound) &
               check_product<T, 2, 4, 128>(type, bound) & check_product<T, 8, 5, 64>(type, bound) &
               check_product<T, 3, 6, 64>(type, bound) & check_product<T, 7, 8, 32>(type, bound);
  right &= Block<T, 40, 320, 96, 3, 4, 32>(3).check(type, bound);
  right &= Block<T, 16, 256, 320, 10, 3, 64>(2).check(type, bound);
  return right & Block<T, 64, 512, 128, 8, 8, 64>(2).check(type, bound);
}

template <int BITS>
static void time_product() {
  constexpr int N = 4096, K = 4096, COPIES = 32;
  Stack<bf16> weights(COPIES, N, K, BITS, 64);
  bf16 *x = array<bf16>(8 * K), *y = array<bf16>(8 * N, false);
  const size_t words = size_t(N) * K * BITS / 32, groups = size_t(N) * K / 64;
  auto time = [&](auto kernel) {
    return microseconds([&](int i) {
      const int copy = i % COPIES;
      kernel<<<dim3(1, N / 8), 64>>>(x, weights.words + copy * words,
                                     weights.scales + copy * groups, weights.biases + copy * groups,
                                     y);
    });
  };
  printf("product of 4096 x 4096, bf16, %d bits: 1 row %.1f us, 4 rows %.1f us, 8 rows %.1f us\n",
         BITS, time(packed_rows<bf16, N, K, 1, BITS, 64>),
         time(packed_rows<bf16, N, K, 4, BITS, 64>), time(packed_rows<bf16, N, K, 8, BITS, 64>));
}

int main(int count, char**) {
  if (count > 1) {
    // For the race checker: a small case.
    Block<float, 8, 64, 32, 4, 4, 32> block(2);
    block.choose_experts(), block.compute_mid(block.chosen), block.compute_out(block.chosen);
    return cudaDeviceSynchronize();
  }
  const bool right = check<float>("f32 ", 1e-5) & check<bf16>("bf16", 2e-2);
  time_product<4>(), time_product<6>(), time_product<8>();
  // The shapes of Qwen3.5-35B-A3B.
  constexpr int E = 256, D = 2048, F = 512, TOP_K = 8;
  for (int rows : {1, 8}) {
    Block<bf16, E, D, F, TOP_K, 4, 64> block(rows);
    const auto &gate = block.gate, &up = block.up, &down = block.down;
    const auto& shared = block.gate_of_shared;
    auto own = [&](int i) { return block.chosen + i % 64 * rows * TOP_K; };
    const double metal[3] = {
        microseconds([&](int) { block.choose_experts(); }),
        microseconds([&](int i) { block.compute_mid(own(i)); }),
        microseconds([&](int i) { block.compute_out(own(i)); }),
    };
    const double cuda[3] = {
        microseconds([&](int) {
          cuda_choose<E, D, TOP_K><<<rows, 256>>>(block.scores, block.x, block.norm, shared.words,
                                                  shared.scales, shared.biases, block.chosen,
                                                  block.shares, block.shared_gate);
        }),
        microseconds([&](int i) {
          cuda_gate_up<D, F, TOP_K><<<dim3((F + 31) / 32, rows * TOP_K), 256>>>(
              block.x, block.norm, own(i), gate.words, gate.scales, gate.biases, up.words,
              up.scales, up.biases, block.mid);
        }),
        microseconds([&](int i) {
          cuda_down<D, F, TOP_K><<<dim3((D + 15) / 16, rows), 256>>>(
              block.mid, own(i), block.shares, down.words, down.scales, down.biases, block.shared,
              block.shared_gate, block.residual, block.out);
        }),
    };
    const char* names[3] = {"choice", "gates, ups", "downs"};
    for (int i = 0; i < 3; i++) {
      printf(
          "%s of %d rows, %d of %d experts, bf16, 4 bits: Metal's text %.1f us, CUDA's %.1f us: "
          "%.0f %%\n",
          names[i], rows, TOP_K, E, metal[i], cuda[i], 100 * cuda[i] / metal[i]);
    }
  }
  return right ? 0 : 1;
}
