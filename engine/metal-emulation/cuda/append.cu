// Keys and values of several spans, written to buffers that the kernel declares as constants: against the same on the host.
#include "metal.cuh"

constexpr int MOST = 9;
#define BUFFER(i) ((i) == 0 ? kv0 : (i) == 1 ? kv1 : (i) == 2 ? kv2 : (i) == 3 ? kv3 : (i) == 4 ? kv4 : \
                   (i) == 5 ? kv5 : (i) == 6 ? kv6 : (i) == 7 ? kv7 : kv8)

template <class T_, int D_> struct Shape {
  using T = T_;
  static constexpr int D = D_;
};

template <class S> __global__ void metal_kernel(
    const typename S::T* kv0, const typename S::T* kv1, const typename S::T* kv2, const typename S::T* kv3,
    const typename S::T* kv4, const typename S::T* kv5, const typename S::T* kv6, const typename S::T* kv7,
    const typename S::T* kv8, const typename S::T* kv, const int* numbers, typename S::T* written) {
  using T = typename S::T;
  constexpr int D = S::D;
#include BODY
}

template <class S> struct Case {
  using T = typename S::T;
  static constexpr int D = S::D;
  int heads, all = 1, count, rows = 0;
  std::vector<int> table, each, lengths;
  T *buffers[MOST], *kv, *written;
  int* numbers;

  // Spans of these rows behind one row of `kv` that is another span's, and the rows in the buffer of each.
  Case(int heads, std::vector<int> each, std::vector<int> lengths)
      : heads(heads), count(int(each.size())), each(each), lengths(lengths) {
    for (int own : each) all += own;
    table = {count, all};
    for (int s = 0; s < MOST; s++)
      buffers[s] = s < count ? array<T>(size_t(heads) * capacity(s) * D) : buffers[0];
    for (int s = 0; s < count; s++) {
      for (int number : {rows, 1 + rows, capacity(s), lengths[s]}) table.push_back(number);
      rows += each[s];
    }
    kv = array<T>(size_t(heads) * all * D), written = array<T>(8, false), numbers = numbers_of(table);
  }
  int capacity(int s) const { return (lengths[s] + each[s] + 63) / 64 * 64; }

  void launch() {
    metal_kernel<S><<<dim3(1, heads, rows), D>>>(buffers[0], buffers[1], buffers[2], buffers[3], buffers[4], buffers[5],
                                                 buffers[6], buffers[7], buffers[8], kv, numbers, written);
  }

  // Launches the kernel and compares every element of all buffers.
  double compare() {
    std::vector<std::vector<float>> right;
    for (int s = 0, first = 1; s < count; first += each[s++]) {
      std::vector<float> buffer(size_t(heads) * capacity(s) * D);
      for (size_t i = 0; i < buffer.size(); i++) buffer[i] = wide(buffers[s][i]);
      for (int head = 0; head < heads; head++)
        for (int row = 0; row < each[s]; row++)
          for (int i = 0; i < D; i++)
            buffer[(size_t(head) * capacity(s) + lengths[s] + row) * D + i] =
                wide(kv[(size_t(head) * all + first + row) * D + i]);
      right.push_back(buffer);
    }
    launch();
    finish();
    Worst worst;
    for (int s = 0; s < count; s++)
      for (size_t i = 0; i < right[s].size(); i++) worst.note(wide(buffers[s][i]), right[s][i]);
    for (int i = 0; i < 8; i++) worst.note(wide(written[i]), 0);
    return worst.relative();
  }
};

int main() {
#ifdef RACES
  Case<Shape<float, 64>> c(4, {1, 4}, {9, 60});
  c.launch();
  finish();
#else
  check("append, f32, steps and drafts of four spans", Case<Shape<float, 96>>(6, {1, 4, 8, 1}, {0, 60, 63, 64}).compare(),
        1e-9);
  check("append, bf16, nine spans",
        Case<Shape<bf16, 256>>(8, std::vector<int>(9, 1), {1, 2, 3, 63, 64, 65, 300, 0, 9}).compare(), 1e-9);
  Case<Shape<bf16, 256>> c(8, std::vector<int>(8, 1), std::vector<int>(8, 1000));
  printf("append, 8 spans of 8 heads of 256, bf16: Metal's text %.1f us\n", microseconds([&](int) { c.launch(); }));
#endif
  return all_hold ? 0 : 1;
}
