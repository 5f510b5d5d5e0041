// Attention of the rows of three spans, of which two may share their first keys: against f64. The
// program defines ATTENTION and JOIN, the texts of the parts and of their join.
#include "metal.cuh"

constexpr int SPLIT = 64, SPANS = 3;

template <class T, int HQ, int HKV, int D>
__global__ void parts_kernel(const T* q, const int* numbers, const T* kv0, const T* kv1,
                             const T* kv2, const T* kv3, float* parts, float* sums) {
  constexpr int SCALE = 0x3e000000;  // the bits of 1/8
#define BUFFER(i) ((i) == 0 ? kv0 : (i) == 1 ? kv1 : (i) == 2 ? kv2 : kv3)
#include ATTENTION
}
#undef RESULT

template <class T, int HQ, int D, int TIME>
__global__ void join_kernel(const float* parts, const float* sums, const int* numbers,
                            const T* gates, T* out) {
  constexpr int GATED = 1;
#include JOIN
}

struct Span {
  int rows, keys, shared_keys;
};

template <class T, int HQ, int HKV, int D, int TIME> struct Case {
  static constexpr int CAPACITY = 4096;
  Span spans[SPANS];
  int rows = 0, all_parts = 0, most_rows = 0;
  // Own keys and values of each span, and those that spans share: keys of all heads, then values.
  T *q, *gates, *kv[SPANS + 1], *out;
  float *parts, *sums;
  int* numbers;

  Case(Span a, Span b, Span c) : spans{a, b, c} {
    std::vector<int> table{SPANS};
    int results = 0;
    for (int s = 0; s < SPANS; s++) {
      const Span& span = spans[s];
      const int own = (span.keys + SPLIT - 1) / SPLIT;
      table.insert(table.end(), {rows, span.rows, span.keys, results, all_parts, span.shared_keys,
                                 s, CAPACITY, SPANS, CAPACITY});
      rows += span.rows, all_parts += own, results += own * span.rows;
      most_rows = span.rows > most_rows ? span.rows : most_rows;
    }
    numbers = numbers_of(table);
    for (T*& buffer : kv) buffer = array<T>(size_t(2) * HKV * CAPACITY * D);
    q = array<T>(size_t(rows) * HQ * D), gates = array<T>(size_t(rows) * HQ * D);
    out = array<T>(size_t(rows) * HQ * D, false);
    parts = array<float>(size_t(results) * HQ * D, false);
    sums = array<float>(size_t(results) * HQ * 2, false);
  }

  void launch() {
    const int blocks = (most_rows * (HQ / HKV) + 3) / 4;
    parts_kernel<T, HQ, HKV, D><<<dim3(all_parts, HKV * blocks), D>>>(
        q, numbers, kv[0], kv[1], kv[2], kv[3], parts, sums);
    join_kernel<T, HQ, D, TIME><<<dim3(1, HQ, rows), D>>>(parts, sums, numbers, gates, out);
  }

  // Element i of the key at position `at`, or of the value.
  double element(int s, bool is_value, int head, int at, int i) const {
    const bool is_shared = at < spans[s].shared_keys;
    const int row = is_shared ? at : at - spans[s].shared_keys;
    const size_t plane = size_t(is_value ? HKV + head : head) * CAPACITY;
    return wide(kv[is_shared ? SPANS : s][(plane + row) * D + i]);
  }

  Worst compare() const {
    Worst worst;
    for (int s = 0, first = 0; s < SPANS; first += spans[s++].rows) {
      for (int r = 0; r < spans[s].rows; r++) {
        for (int h = 0; h < HQ; h++) {
          const size_t from = (size_t(first + r) * HQ + h) * D;
          const int head = h / (HQ / HKV), seen = spans[s].keys - spans[s].rows + r + 1;
          std::vector<double> weights(seen), mixed(D);
          double most = -INFINITY, sum = 0;
          for (int at = 0; at < seen; at++) {
            for (int i = 0; i < D; i++) {
              weights[at] += wide(q[from + i]) * 0.125 * element(s, false, head, at, i);
            }
            most = fmax(most, weights[at]);
          }
          for (int at = 0; at < seen; at++) {
            const double weight = exp(weights[at] - most);
            sum += weight;
            for (int i = 0; i < D; i++) mixed[i] += weight * element(s, true, head, at, i);
          }
          for (int i = 0; i < D; i++) {
            worst.note(wide(out[from + i]), mixed[i] / sum / (1 + exp(-wide(gates[from + i]))));
          }
        }
      }
    }
    return worst;
  }
};

template <class T, int HQ, int HKV, int D, int TIME>
void check_shape(const char* name, double bound) {
  Case<T, HQ, HKV, D, TIME> c({2, 200, 64}, {5, 71, 64}, {1, 1000, 0});
  c.launch();
  finish();
  check(name, c.compare().relative(), bound);
}

int main() {
#ifdef RACES
  // More parts than are joined at a time. For fewer than four at a time nvcc makes reads of four.
  Case<float, 2, 1, 64, 4> c({2, 300, 64}, {3, 71, 64}, {1, 30, 0});
  c.launch();
  finish();
#else
  check_shape<float, 4, 2, 64, 64>("attention, f32, 4 + 2 heads of 64", 1e-5);
  check_shape<float, 6, 1, 96, 2>("attention, f32, 6 + 1 heads of 96, 2 parts at a time", 1e-5);
  check_shape<bf16, 8, 2, 256, 64>("attention, bf16, 8 + 2 heads of 256", 2e-2);
  Case<bf16, 16, 4, 256, 64> c({1, 4096, 2048}, {1, 4096, 2048}, {1, 4096, 0});
  printf("attention, 16 + 4 heads of 256, bf16, 3 spans of 4096 keys: Metal's texts %.1f us\n",
         microseconds([&](int) { c.launch(); }));
#endif
  return all_hold ? 0 : 1;
}
