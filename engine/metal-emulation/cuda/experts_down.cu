// Experts of few rows: choice, gates and ups, downs. Against f64, and beside our CUDA kernels.
#include "metal.cuh"

#define inline __device__ inline
#include "../../src/kernels/metal/affine.metal"
#undef inline

#define GATE_PRODUCT(at, inputs, total) \
  product<BITS>(gate, gate_scales, gate_biases, (at) / 8, (at) / GROUP, inputs, total)
template <class T, int E, int D, int TOP_K, int BITS, int GROUP>
__global__ void choose(const T* scores, const T* x, const uint* gate, const T* gate_scales,
                       const T* gate_biases, T* shares, uint* chosen, T* shared_gate) {
  constexpr int NORMED = 1, SCALE = 0x3f800000;
#include "../../src/kernels/metal/choose.metal"
}

template <class T, int D, int F, int TOP_K, int BITS, int GROUP>
__global__ void gate_up(const T* x, const uint* chosen, const uint* gate, const T* gate_scales,
                        const T* gate_biases, const uint* up, const T* up_scales,
                        const T* up_biases, T* mid) {
#include "../../src/kernels/metal/experts_gate_up.metal"
}

#define SHARED_EXPERT(i) \
  ROUNDED(static_cast<float>(shared[i]) * static_cast<float>(shared_gate[row]))
template <class T, int D, int F, int TOP_K, int BITS, int GROUP>
__global__ void down_sum(const T* mid, const uint* chosen, const T* shares, const T* residual,
                         const uint* down, const T* down_scales, const T* down_biases,
                         const T* shared, const T* shared_gate, T* out) {
#include BODY
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

  void check_all(const char* type, double bound) {
    choose_experts(), compute_mid(chosen), compute_out(chosen);
    finish();
    Worst choice, mids, outs;
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
    const Worst worst[] = {choice, mids, outs};
    const char* const parts[] = {"choice", "gates and ups", "downs"};
    for (int i = 0; i < 3; i++) {
      char title[100];
      snprintf(title, sizeof title, "experts, %s, %d bits in groups of %d, %s", type, BITS, GROUP,
               parts[i]);
      check(title, worst[i].relative(), bound);
    }
  }
};

template <class T>
void check_blocks(const char* type, double bound) {
  Block<T, 40, 320, 96, 3, 4, 32>(3).check_all(type, bound);
  Block<T, 16, 256, 320, 10, 3, 64>(2).check_all(type, bound);
  Block<T, 64, 512, 128, 8, 8, 64>(2).check_all(type, bound);
}

int main() {
#ifdef RACES
  Block<float, 8, 64, 32, 4, 4, 32> block(2);
  block.choose_experts(), block.compute_mid(block.chosen), block.compute_out(block.chosen);
  finish();
#else
  check_blocks<float>("f32", 1e-5);
  check_blocks<bf16>("bf16", 2e-2);
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
#endif
  return all_hold ? 0 : 1;
}
