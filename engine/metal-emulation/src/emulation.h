// Runs the body of a Metal kernel on a CPU. Threadgroups run one after another, and each thread of one is a fiber, which
// runs until it reaches a barrier or a collective of its simdgroup. Between them, threads run in an order that the caller
// chooses.
//
// A launch fails, with a sentence, if
// - some threads do not reach a barrier, or not the same one;
// - some lanes of a simdgroup do not reach a collective, or not the same one;
// - two threads use an element of threadgroup memory, one of them writes it, and no barrier is between (in any order);
// - an index of threadgroup memory is out of bounds, or an element is read that was not written.
// The caller (lib.rs) checks the bounds of buffers.
//
// Differs from a Mac: no fast math and no fused multiply-add but `fma`; sums of a simdgroup are added as a butterfly.

// Headers of C only: each text is compiled with this one before it, and those of C++ take longer than all else here.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

using uint = uint32_t;
using ushort = uint16_t;
using uchar = uint8_t;
struct uint3 {
  uint x, y, z;
};

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? uint16_t(wide >> 16 | 64) : uint16_t((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  explicit operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
};

#if defined(__FLT16_MAX__)
using half = _Float16;
#endif

namespace emulation {

constexpr int LANES = 32, MOST_THREADS = 1024;
// Not a power of two: the ends of all stacks would share a few lines of the processor's caches.
constexpr size_t STACK = (32 << 10) + 5 * 64;

enum class Waits { nothing, barrier, collective, end };

struct Fiber {
  void* stack_pointer;
  Waits waits;
  int line;
};

static Fiber fibers[MOST_THREADS];
alignas(64) static char stacks[STACK * MOST_THREADS];
static void* scheduler;
static int current, threads;
static uint3 group_size, group_place;
// Barriers that all threads have passed.
static uint32_t epoch;
static char problem[200];
static bool failed;
// What lanes give to a collective, and what they see once all have come.
static uint64_t given[MOST_THREADS], seen[MOST_THREADS];
// What the first lane of each simdgroup has computed of what all see.
static uint64_t shared_result[MOST_THREADS / LANES];
static bool has_result[MOST_THREADS / LANES];

// Saves the registers of the running fiber on its stack, its stack pointer in `*from`, and continues at `to`.
extern "C" void emulation_switch(void** from, void* to) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.text
emulation_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
constexpr int SAVED = 6, RETURN = 6;
#elif defined(__aarch64__)
asm(R"(
.text
emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr int SAVED = 20, RETURN = 11;
#else
#error "fibers are written for x86-64 and aarch64"
#endif

static void pause(Waits waits, int line) {
  Fiber& own = fibers[current];
  own.waits = waits;
  own.line = line;
  const int me = current;
  emulation_switch(&own.stack_pointer, scheduler);
  current = me;
}

static void fail(const char* what, int line) {
  if (!failed) snprintf(problem, sizeof problem, "%s (line %d of the text)", what, line);
  failed = true;
}

// Ends the launch, from a thread.
static void stop(const char* what, int line) {
  fail(what, line);
  pause(Waits::end, line);
}

template <typename T> T collect(T x, int line) {
  static_assert(sizeof(T) <= 8, "lanes exchange up to 8 bytes");
  memcpy(&given[current], &x, sizeof x);
  pause(Waits::collective, line);
  return x;
}

template <typename T> T of_lane(int lane) {
  T x;
  memcpy(&x, &seen[current / LANES * LANES + lane], sizeof x);
  return x;
}

// What every lane computes alike of what all see, computed once.
template <typename T, typename F> T once(F compute) {
  const int group = current / LANES;
  T x;
  if (has_result[group]) {
    memcpy(&x, &shared_result[group], sizeof x);
  } else {
    x = compute();
    memcpy(&shared_result[group], &x, sizeof x);
    has_result[group] = true;
  }
  return x;
}

// An array in threadgroup memory.
template <typename T, int N> struct Shared {
  struct Use {
    uint32_t written_in, read_in;
    // -1: several
    int16_t writer, reader;
    bool has_value;
  };
  T values[N];
  Use uses[N];

  struct Element {
    Shared& all;
    int i, line;
    operator T() const { return all.read(i, line); }
    template <typename S> explicit operator S() const { return static_cast<S>(all.read(i, line)); }
    void operator=(T x) { all.write(i, x, line); }
    void operator=(const Element& x) { all.write(i, T(x), line); }
    void operator*=(T x) { all.write(i, all.read(i, line) * x, line); }
    void operator+=(T x) { all.write(i, all.read(i, line) + x, line); }
  };

  struct Place {
    uint64_t i;
    int line;
    template <typename I> Place(I i, int line = __builtin_LINE()) : i(uint64_t(int64_t(i))), line(line) {}
  };
  Element operator[](Place at) {
    if (at.i >= uint64_t(N)) stop("an index of threadgroup memory is out of bounds", at.line);
    return {*this, int(at.i), at.line};
  }

  T read(int i, int line) {
    Use& use = uses[i];
    if (!use.has_value) stop("a thread reads what nothing has written, or another one will without a barrier", line);
    if (use.written_in == epoch && use.writer != current) stop("a thread reads what another one writes, without a barrier", line);
    if (use.read_in != epoch) {
      use.read_in = epoch;
      use.reader = int16_t(current);
    } else if (use.reader != current) {
      use.reader = -1;
    }
    return values[i];
  }

  void write(int i, T x, int line) {
    Use& use = uses[i];
    const bool is_read = use.read_in == epoch && use.reader != current;
    const bool is_written = use.written_in == epoch && use.writer != current;
    if (is_read || is_written) stop("a thread writes what another one uses, without a barrier", line);
    use.written_in = epoch;
    use.writer = int16_t(current);
    use.has_value = true;
    values[i] = x;
  }

  // Each threadgroup begins with memory that has no values. Called by all its threads.
  void begin(uint32_t group) {
    if (last_group != group) memset(uses, 0, sizeof uses), last_group = group;
  }
  uint32_t last_group;
};
static uint32_t group_number;

static uint32_t random_state;
static uint32_t random_below(uint32_t bound) {
  random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
  return random_state % bound;
}

static void body();
static void enter() {
  body();
  pause(Waits::end, 0);
  __builtin_trap();
}

static void run_group(uint32_t order) {
  for (int i = 0; i < threads; i++) {
    // Aligned to 16 bytes where `enter` begins, with a return address on top as after a call.
    auto top = reinterpret_cast<void**>(stacks + STACK * (i + 1)) - 2;
    auto saved = top - SAVED;
    memset(saved, 0, SAVED * sizeof(void*));
    saved[RETURN] = reinterpret_cast<void*>(enter);
    fibers[i] = {saved, Waits::nothing, 0};
  }
  static int turns[MOST_THREADS];
  for (int i = 0; i < threads; i++) turns[i] = order == 1 ? threads - 1 - i : i;
  const int groups = threads / LANES;
  epoch++;
  while (!failed) {
    for (int i = threads - 1; order > 1 && i > 0; i--) {
      const int j = int(random_below(uint32_t(i + 1))), turn = turns[i];
      turns[i] = turns[j], turns[j] = turn;
    }
    for (int i = 0; i < threads && !failed; i++) {
      if (fibers[turns[i]].waits != Waits::nothing) continue;
      current = turns[i];
      emulation_switch(&scheduler, fibers[current].stack_pointer);
    }
    if (failed) return;
    int ended = 0, at_barrier = 0;
    for (int i = 0; i < threads; i++) {
      ended += fibers[i].waits == Waits::end;
      at_barrier += fibers[i].waits == Waits::barrier;
    }
    if (ended == threads) return;
    if (at_barrier == threads) {
      for (int i = 0; i < threads; i++) {
        if (fibers[i].line != fibers[0].line) return fail("threads of a threadgroup reach different barriers", fibers[i].line);
        fibers[i].waits = Waits::nothing;
      }
      epoch++;
      continue;
    }
    bool moved = false;
    const int first_group = order > 1 ? int(random_below(uint32_t(groups))) : 0;
    for (int g = 0; g < groups; g++) {
      Fiber* own = fibers + (g + first_group) % groups * LANES;
      int here = 0, line = 0;
      for (int i = 0; i < LANES; i++) {
        if (own[i].waits == Waits::collective) here++, line = own[i].line;
      }
      if (here == 0) continue;
      if (here < LANES) return fail("some lanes of a simdgroup do not reach a collective", line);
      for (int i = 0; i < LANES; i++) {
        if (own[i].line != line) return fail("lanes of a simdgroup reach different collectives", line);
      }
      // Simdgroups drift apart.
      if (order > 1 && moved && random_below(4) > 0) continue;
      const size_t from = size_t(own - fibers);
      memcpy(seen + from, given + from, LANES * sizeof given[0]);
      has_result[from / LANES] = false;
      for (int i = 0; i < LANES; i++) own[i].waits = Waits::nothing;
      moved = true;
    }
    if (!moved) return fail("some threads of a threadgroup do not reach a barrier", at_barrier > 0 ? 0 : -1);
  }
}

// `order` of threads: 0 ascending, 1 descending, otherwise a seed of random orders.
static const char* run(const uint* grid, const uint* size, uint32_t order) {
  group_size = {size[0], size[1], size[2]};
  threads = int(size[0] * size[1] * size[2]);
  failed = false;
  random_state = order * 2654435761u + 1;
  if (threads % LANES != 0 || threads > MOST_THREADS || threads == 0) return "the threads of a threadgroup are no multiple of 32 up to 1024";
  for (int i = 0; i < 3; i++) {
    if (grid[i] % size[i] != 0) return "the grid is no multiple of the threadgroup";
  }
  const uint3 groups = {grid[0] / size[0], grid[1] / size[1], grid[2] / size[2]};
  for (uint z = 0; z < groups.z; z++) {
    for (uint y = 0; y < groups.y; y++) {
      for (uint x = 0; x < groups.x; x++) {
        group_place = {x, y, z};
        group_number++;
        run_group(order);
        if (failed) return problem;
      }
    }
  }
  return nullptr;
}

static uint3 place_in_group() {
  const uint i = uint(current);
  return {i % group_size.x, i / group_size.x % group_size.y, i / (group_size.x * group_size.y)};
}

static uint3 place_in_grid() {
  const uint3 own = place_in_group();
  return {group_place.x * group_size.x + own.x, group_place.y * group_size.y + own.y, group_place.z * group_size.z + own.z};
}

} // namespace emulation

#define device
#define constant
#define threadgroup
#define thread
#define SHARED(T, name, n) static emulation::Shared<T, (n)> name; name.begin(emulation::group_number)

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
static inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) {
  emulation::pause(emulation::Waits::barrier, line);
}
template <typename T> T simd_sum(T x, int line = __builtin_LINE()) {
  emulation::collect(x, line);
  return emulation::once<T>([] {
    T sums[emulation::LANES];
    for (int i = 0; i < emulation::LANES; i++) sums[i] = emulation::of_lane<T>(i);
    // Lanes that add what they have to what their neighbors have, 1, 2, 4 .. lanes apart, all have the sum of this tree.
    for (int count = emulation::LANES / 2; count > 0; count /= 2)
      for (int i = 0; i < count; i++) sums[i] = T(sums[2 * i] + sums[2 * i + 1]);
    return sums[0];
  });
}
template <typename T> T simd_max(T x, int line = __builtin_LINE()) {
  emulation::collect(x, line);
  return emulation::once<T>([] {
    T most = emulation::of_lane<T>(0);
    for (int i = 1; i < emulation::LANES; i++) most = most < emulation::of_lane<T>(i) ? emulation::of_lane<T>(i) : most;
    return most;
  });
}
template <typename T> T simd_shuffle(T x, ushort from, int line = __builtin_LINE()) {
  emulation::collect(x, line);
  return emulation::of_lane<T>(from % emulation::LANES);
}
template <typename T> T simd_shuffle_xor(T x, ushort mask, int line = __builtin_LINE()) {
  emulation::collect(x, line);
  return emulation::of_lane<T>((emulation::current % emulation::LANES) ^ mask);
}

#define thread_index_in_simdgroup uint(emulation::current % emulation::LANES)
#define simdgroup_index_in_threadgroup uint(emulation::current / emulation::LANES)
#define thread_index_in_threadgroup uint(emulation::current)
#define thread_position_in_threadgroup (emulation::place_in_group())
#define threadgroup_position_in_grid (emulation::group_place)
#define thread_position_in_grid (emulation::place_in_grid())
#define threads_per_threadgroup (emulation::group_size)

template <typename To, typename From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
#define INFINITY __builtin_inff()
static inline float cos(float x) { return __builtin_cosf(x); }
static inline float exp(float x) { return __builtin_expf(x); }
static inline float exp2(float x) { return __builtin_exp2f(x); }
static inline float fabs(float x) { return __builtin_fabsf(x); }
static inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float fmax(float x, float y) { return __builtin_fmaxf(x, y); }
static inline float fmin(float x, float y) { return __builtin_fminf(x, y); }
static inline float log(float x) { return __builtin_logf(x); }
static inline float sin(float x) { return __builtin_sinf(x); }
static inline float sqrt(float x) { return __builtin_sqrtf(x); }
static inline float rsqrt(float x) { return 1 / sqrt(x); }
template <typename T> T min(T a, T b) { return b < a ? b : a; }
template <typename T> T max(T a, T b) { return a < b ? b : a; }
