// Norms and rotation of heads: against f64.
#include "metal.cuh"

template <class T_, int HQ_, int HKV_, int D_, int GATED_, int JOINED_, int NORMED_, int DIMS_>
struct Shape {
  using T = T_;
  static constexpr int HQ = HQ_, HKV = HKV_, D = D_, GATED = GATED_, JOINED = JOINED_,
                       NORMED = NORMED_, DIMS = DIMS_;
};

template <class S> __global__ void metal_kernel(const typename S::T* x_q, const typename S::T* x_k,
                                                const typename S::T* x_v, const int* numbers,
                                                const typename S::T* q_norm,
                                                const typename S::T* k_norm,
                                                const float* frequencies, typename S::T* rotated,
                                                typename S::T* kv, typename S::T* gates) {
  using T = typename S::T;
  constexpr int HQ = S::HQ, HKV = S::HKV, D = S::D, GATED = S::GATED, JOINED = S::JOINED,
                NORMED = S::NORMED, DIMS = S::DIMS;
  constexpr int EPS = EPSILON, SCALE = ONE;
#include BODY
}

template <class S> struct Case {
  using T = typename S::T;
  static constexpr int HQ = S::HQ, HKV = S::HKV, D = S::D, Q_HEAD = S::GATED ? 2 * D : D;
  static constexpr int ALL = HQ * Q_HEAD + 2 * HKV * D;
  static constexpr int WIDTHS[3] = {S::JOINED ? ALL : HQ * Q_HEAD, S::JOINED ? ALL : HKV * D,
                                    S::JOINED ? ALL : HKV * D};
  int rows;
  std::vector<int> positions;
  T *x[3], *norms[2], *rotated, *kv, *gates;
  float* frequencies;
  int* numbers;

  Case(std::vector<int> at) : rows(int(at.size())), positions(at) {
    for (int i = 0; i < 3; i++)
      x[i] = S::JOINED && i > 0 ? x[0] : array<T>(size_t(rows) * WIDTHS[i]);
    for (T*& norm : norms) norm = array<T>(D);
    frequencies = array<float>(S::DIMS > 0 ? S::DIMS / 2 : 1);
    const float dims = S::DIMS > 0 ? S::DIMS : 1;
    for (int i = 0; i < S::DIMS / 2; i++) frequencies[i] = powf(10000, -2 * i / dims);
    rotated = array<T>(size_t(rows) * HQ * D, false),
    kv = array<T>(size_t(2) * HKV * rows * D, false);
    gates = S::GATED ? array<T>(size_t(rows) * HQ * D, false) : rotated;
    at.insert(at.begin(), rows);
    numbers = numbers_of(at);
  }

  void launch() {
    metal_kernel<S><<<dim3(1, HQ + 2 * HKV, rows), D>>>(x[0], x[1], x[2], numbers, norms[0],
                                                        norms[1], frequencies, rotated, kv, gates);
  }

  Worst compare() {
    Worst worst;
    for (int row = 0; row < rows; row++) {
      for (int slot = 0; slot < HQ + 2 * HKV; slot++) {
        const int part = (slot >= HQ) + (slot >= HQ + HKV);
        const int head = part == 0 ? slot : (slot - HQ) % HKV;
        const int before = !S::JOINED || part == 0 ? 0 : HQ * Q_HEAD + (part == 2 ? HKV * D : 0);
        const T* const own =
            x[part] + size_t(row) * WIDTHS[part] + before + head * (part == 0 ? Q_HEAD : D);
        double y[D], squares = 0;
        for (int i = 0; i < D; i++) y[i] = wide(own[i]), squares += y[i] * y[i];
        for (int i = 0; i < D && S::NORMED && part < 2; i++)
          y[i] *= wide(norms[part][i]) / sqrt(squares / D + 1e-6);
        for (int i = 0; i < S::DIMS / 2 && part < 2; i++) {
          // In f32, as the angle is an input of the rotation.
          const float angle = float(positions[row]) * frequencies[i];
          const double first = y[i], second = y[i + S::DIMS / 2], sine = sin(double(angle)),
                       cosine = cos(double(angle));
          y[i] = first * cosine - second * sine,
          y[i + S::DIMS / 2] = first * sine + second * cosine;
        }
        const int kv_head = part == 2 ? HKV + head : head;
        const T* const ours = part == 0 ? rotated + size_t(row * HQ + head) * D
                                        : kv + size_t(kv_head * rows + row) * D;
        for (int i = 0; i < D; i++) {
          worst.note(wide(ours[i]), y[i]);
          if (part == 0 && S::GATED)
            worst.note(wide(gates[size_t(row * HQ + head) * D + i]), wide(own[D + i]));
        }
      }
    }
    return worst;
  }
};

template <class S> void check_shape(const char* name, double bound) {
  Case<S> c({0, 1, 7, 4095, 100000});
  c.launch();
  finish();
  check(name, c.compare().relative(), bound);
}

int main() {
#ifdef RACES
  Case<Shape<float, 2, 1, 128, 1, 1, 1, 64>> c({3, 4});
  c.launch();
  finish();
#else
  check_shape<Shape<float, 4, 2, 256, 1, 1, 1, 64>>(
      "heads, f32, gated, joined, normed, 64 of 256 dimensions rotated", 1e-5);
  check_shape<Shape<bf16, 4, 2, 256, 1, 1, 1, 64>>(
      "heads, bf16, gated, joined, normed, 64 of 256 dimensions rotated", 1e-2);
  check_shape<Shape<float, 2, 2, 32, 0, 0, 0, 32>>("heads, f32, apart, rotated", 1e-5);
  check_shape<Shape<bf16, 3, 1, 96, 0, 0, 1, 0>>("heads, bf16, apart, normed", 1e-2);
  Case<Shape<bf16, 16, 4, 256, 1, 1, 1, 64>> c({100, 101, 102, 103});
  printf("heads, 16 + 4 heads of 256, bf16, 4 rows: Metal's text %.1f us\n",
         microseconds([&](int) { c.launch(); }));
#endif
  return all_hold ? 0 : 1;
}
