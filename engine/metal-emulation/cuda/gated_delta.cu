// GatedDeltaNet: against f64, and beside our CUDA kernel.
#include "metal.cuh"

#define RECORDED(x)

template <class T, int HK, int HV, int D> __global__ void __launch_bounds__(512)
    cuda_kernel(const T* qkv, const float* a_log, const T* dt_bias, const T* norm, const T* tap0,
                const T* tap1, const T* tap2, const T* tap3, const float* state, const T* tail,
                T* out, float* next_state, T* next_tail, int rows) {
  constexpr int DK = D, DV = D, EPS = EPSILON, JOINED = 1, CLUSTER = 1;
  const T *z = qkv, *b = qkv, *a = qkv;
#include "../../src/kernels/cuda/gated_delta.cu"
}

template <class T, int HK, int HV, int D> __global__ void __launch_bounds__(32 * D / 8)
    metal_kernel(const T* x_qkv, const int* numbers, const float* a_log, const T* dt_bias,
                 const T* norm, const T* tap0, const T* tap1, const T* tap2, const T* tap3,
                 const float* state0, const T* tail0, T* out, float* next_state, T* next_tail) {
  constexpr int DK = D, DV = D, EPS = EPSILON, JOINED = 1;
  const T *x_z = x_qkv, *x_b = x_qkv, *x_a = x_qkv;
#define STATE(i) state0
#define TAIL(i) tail0
#include BODY
}

template <class T, int HK, int HV, int D> struct Case {
  static constexpr int C = 2 * HK * D + HV * D, ALL = C + HV * D + 2 * HV;
  int rows, batch;
  T *x, *dt_bias, *norm, *taps[4], *tail, *out, *next_tail;
  float *a_log, *state, *next_state;
  int* numbers;

  Case(int rows, int batch) : rows(rows), batch(batch) {
    x = array<T>(size_t(batch) * rows * ALL), dt_bias = array<T>(HV), norm = array<T>(D);
    for (T*& tap : taps) tap = array<T>(C);
    tail = array<T>(size_t(batch) * 3 * C), state = array<float>(size_t(batch) * HV * D * D),
    a_log = array<float>(HV);
    out = array<T>(size_t(batch) * rows * HV * D, false),
    next_tail = array<T>(size_t(batch) * 3 * C, false);
    next_state = array<float>(size_t(batch) * HV * D * D, false);
    std::vector<int> places{rows};
    for (int s = 0; s < batch; s++) places.insert(places.end(), {0, s, 0, s});
    numbers = numbers_of(places);
  }

  void launch(bool metal) {
    if (metal) {
      metal_kernel<T, HK, HV, D><<<dim3(1, HV, batch), 32 * D / 8>>>(
          x, numbers, a_log, dt_bias, norm, taps[0], taps[1], taps[2], taps[3], state, tail, out,
          next_state, next_tail);
    } else {
      cuda_kernel<T, HK, HV, D><<<dim3(HV, batch), 512>>>(x, a_log, dt_bias, norm, taps[0], taps[1],
                                                          taps[2], taps[3], state, tail, out,
                                                          next_state, next_tail, rows);
    }
  }

  // Differences from f64: of the output, of the state and of the tail.
  void compare(Worst (&worst)[3]) {
    auto sigmoid = [](double x) { return 1 / (1 + exp(-x)); };
    for (int s = 0; s < batch; s++) {
      auto input = [&](int t, int c) {
        return t >= 0 ? wide(x[size_t(s * rows + t) * ALL + c])
                      : wide(tail[size_t(s * 3 + 3 + t) * C + c]);
      };
      auto convolved = [&](int t, int c) {
        double sum = 0;
        for (int tap = 0; tap < 4; tap++) sum += double(input(t + tap - 3, c)) * wide(taps[tap][c]);
        return sum * sigmoid(sum);
      };
      for (int row = 0; row < 3; row++) {
        for (int c = 0; c < C; c++)
          worst[2].note(wide(next_tail[size_t(s * 3 + row) * C + c]), input(rows - 3 + row, c));
      }
      for (int h = 0; h < HV; h++) {
        std::vector<double> S(state + size_t(s * HV + h) * D * D,
                              state + size_t(s * HV + h + 1) * D * D);
        for (int t = 0; t < rows; t++) {
          double q[D], k[D], y[D], qq = 1e-6, kk = 1e-6, yy = 0;
          const int key_head = h / (HV / HK);
          for (int i = 0; i < D; i++) {
            q[i] = convolved(t, key_head * D + i), k[i] = convolved(t, (HK + key_head) * D + i);
            qq += q[i] * q[i], kk += k[i] * k[i];
          }
          for (int i = 0; i < D; i++) q[i] /= sqrt(qq * D), k[i] /= sqrt(kk);
          auto gate = [&](int at) { return double(wide(x[size_t(s * rows + t) * ALL + at])); };
          const double duration = log1p(exp(gate(C + HV * D + HV + h) + wide(dt_bias[h])));
          const double decay = exp(-exp(a_log[h]) * duration),
                       strength = sigmoid(gate(C + HV * D + h));
          for (int r = 0; r < D; r++) {
            double seen = 0;
            for (int i = 0; i < D; i++) seen += S[r * D + i] * k[i];
            const double d = strength * (convolved(t, 2 * HK * D + h * D + r) - decay * seen);
            y[r] = 0;
            for (int i = 0; i < D; i++)
              S[r * D + i] = decay * S[r * D + i] + d * k[i], y[r] += S[r * D + i] * q[i];
            yy += y[r] * y[r];
          }
          for (int r = 0; r < D; r++) {
            const double z = gate(C + h * D + r),
                         right = y[r] / sqrt(yy / D + 1e-6) * wide(norm[r]) * z * sigmoid(z);
            worst[0].note(wide(out[size_t(s * rows + t) * HV * D + h * D + r]), right);
          }
        }
        for (int i = 0; i < D * D; i++)
          worst[1].note(next_state[size_t(s * HV + h) * D * D + i], S[i]);
      }
    }
  }
};

template <class T> void check_all(const char* name, double bound) {
  for (int rows : {1, 4, 6, 17}) {
    Case<T, 2, 4, 128> c(rows, 2);
    for (bool metal : {true, false}) {
      c.launch(metal);
      finish();
      Worst worst[3];
      c.compare(worst);
      char title[100];
      const char* const parts[] = {"output", "state", "tail"};
      const double bounds[] = {bound, 1e-5, 1e-30};
      for (int i = 0; i < 3; i++) {
        snprintf(title, sizeof title, "gated_delta, %s, %s, %2d rows, %s",
                 metal ? "Metal's text" : "CUDA's text", name, rows, parts[i]);
        check(title, worst[i].relative(), bounds[i]);
      }
    }
  }
}

int main() {
#ifdef RACES
  Case<float, 1, 2, 32> c(6, 1);
  c.launch(true);
  finish();
#else
  check_all<float>("f32", 1e-5);
  check_all<bf16>("bf16", 1e-2);
  for (int batch : {1, 8}) {
    for (int rows : {1, 4, 64}) {
      Case<bf16, 16, 32, 128> c(rows, batch);
      const double metal = microseconds([&](int) { c.launch(true); }),
                   own = microseconds([&](int) { c.launch(false); });
      printf(
          "gated_delta, 16 + 32 heads of 128, bf16, %d sequences, %2d rows: Metal's text %.1f us, "
          "CUDA's %.1f us: %.0f %%\n",
          batch, rows, metal, own, 100 * own / metal);
    }
  }
#endif
  return all_hold ? 0 : 1;
}
