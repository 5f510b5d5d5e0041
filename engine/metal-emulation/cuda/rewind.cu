// State and tail after the first rows of a draft: against f64.
#include "metal.cuh"

template <class T, int HEADS, int DV, int DK, int CHANNELS, int TAPS>
__global__ void metal_kernel(const float* states, const float* keys, const float* corrections,
                             const float* log_decays, const T* tails, const T* x,
                             const int* numbers, float* next_state, T* next_tail) {
#include BODY
}

// One of two sequences of a batch, in which others come before it.
template <class T, int HEADS, int D> struct Case {
  static constexpr int TAPS = 3, CHANNELS = 3 * HEADS * D, WIDTH = CHANNELS + 40,
                       STATE = HEADS * D * D;
  int keep, rows;
  float *states, *keys, *corrections, *log_decays, *next_state;
  T *tails, *x, *next_tail;
  int* numbers;

  Case(int keep, int rows) : keep(keep), rows(rows) {
    states = array<float>(2 * STATE), keys = array<float>(size_t(2) * HEADS * rows * D);
    corrections = array<float>(size_t(2) * HEADS * rows * D),
    log_decays = array<float>(size_t(2) * HEADS * rows);
    for (int i = 0; i < 2 * HEADS * rows; i++) log_decays[i] = -fabsf(log_decays[i]);
    tails = array<T>(2 * TAPS * CHANNELS), x = array<T>(size_t(2) * rows * WIDTH);
    next_state = array<float>(STATE, false), next_tail = array<T>(TAPS * CHANNELS, false);
    numbers = numbers_of({keep, rows, 1, 1, 1, 1, WIDTH});
  }

  void launch() {
    metal_kernel<T, HEADS, D, D, CHANNELS, TAPS><<<(STATE + TAPS * CHANNELS + 255) / 256, 256>>>(
        states, keys, corrections, log_decays, tails, x, numbers, next_state, next_tail);
  }

  void check_all(const char* name) {
    launch();
    finish();
    Worst worst[2];
    for (int head = 0; head < HEADS; head++) {
      const int first = (HEADS + head) * rows;
      for (int i = 0; i < D * D; i++) {
        double s = states[STATE + head * D * D + i];
        for (int t = first; t < first + keep; t++) {
          s = s * exp(double(log_decays[t])) +
              double(corrections[t * D + i / D]) * keys[t * D + i % D];
        }
        worst[0].note(next_state[head * D * D + i], s);
      }
    }
    for (int tap = 0; tap < TAPS; tap++) {
      const int row = keep + tap;
      for (int c = 0; c < CHANNELS; c++) {
        const T& right =
            row < TAPS ? tails[(TAPS + row) * CHANNELS + c] : x[(rows + row - TAPS) * WIDTH + c];
        worst[1].note(wide(next_tail[tap * CHANNELS + c]), wide(right));
      }
    }
    char title[100];
    for (int i = 0; i < 2; i++) {
      snprintf(title, sizeof title, "rewind, %s, %d of %d rows, %s", name, keep, rows,
               i == 0 ? "state" : "tail");
      check(title, worst[i].relative(), i == 0 ? 1e-5 : 1e-30);
    }
  }
};

int main() {
#ifdef RACES
  Case<float, 2, 32> c(2, 4);
  c.launch();
  finish();
#else
  for (int keep : {0, 1, 2, 3, 5, 8}) {
    Case<float, 3, 64>(keep, 8).check_all("f32");
    Case<bf16, 3, 64>(keep, 8).check_all("bf16");
  }
  Case<bf16, 32, 128> c(2, 4);
  printf("rewind, 32 heads of 128, bf16, 2 of 4 rows: Metal's text %.1f us\n",
         microseconds([&](int) { c.launch(); }));
#endif
  return all_hold ? 0 : 1;
}
