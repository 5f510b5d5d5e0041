// What kernels share.

// 16-bit floats. CUDA's own headers would have to be installed where kernels are compiled, and take most of the time.
struct bf16 {
  unsigned short bits;
  bf16() = default;
  __device__ explicit bf16(float x) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  __device__ explicit operator float() const {
    return __uint_as_float(unsigned(bits) << 16);
  }
};
struct f16 {
  unsigned short bits;
  f16() = default;
  __device__ explicit f16(float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

// Waits until the kernels before have ended and their results can be read, then lets the next kernel start. What comes
// before it overlaps the end of the last kernel, and may read only what no kernel writes: weights.
__device__ inline void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Reads a line (128 bytes) into the second-level cache, which every kernel sees: whoever writes it later, no old value
// is read. So it may come before `wait_for_inputs`.
__device__ inline void prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// Waits for all threads of a cluster of CLUSTER blocks.
template <int CLUSTER>
__device__ inline void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// A float in the shared memory of block `rank` of the cluster.
template <int CLUSTER>
__device__ inline float remote(const float* at, int rank) {
#if __CUDA_ARCH__ >= 900
  if (CLUSTER > 1) {
    unsigned address;
    float value;
    asm("{ .reg .u64 here; cvta.to.shared.u64 here, %1; cvt.u32.u64 %0, here; }" : "=r"(address) : "l"(at));
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
  }
#endif
  return *at;
}

// Adds up N numbers (a power of 2, at most 32) over the lanes of a warp. Lane l gets the sum of number l / (32 / N). Lanes
// exchange halves of their numbers, so that it takes about N steps instead of 5 N.
template <int N>
__device__ inline float lane_sums(float (&x)[N], int lane) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
    const int step = 32 / N * half;
    const bool upper = lane & step;
#pragma unroll
    for (int n = 0; n < half; n++) {
      const float kept = upper ? x[n + half] : x[n], given = upper ? x[n] : x[n + half];
      x[n] = kept + __shfl_xor_sync(~0u, given, step);
    }
  }
  float sum = x[0];
  for (int step = 16 / N; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// An element of a delta rule's state after a row: rounded as written here, so that all kernels compute the same bits.
__device__ inline float written(float state, float decay, float correction, float key) {
  return __fmaf_rn(correction, key, __fmul_rn(decay, state));
}

// Weights of a lane in a row of a matrix of 4 bits in groups of 64: 32 neighbours.
struct Weights {
  uint4 words;
  float scale, bias;
};
constexpr int LANE_WEIGHTS = 32, WARP_WEIGHTS = 32 * LANE_WEIGHTS;

// Those from input `at` on, of row `row`. Without them if they are not `there`.
__device__ inline Weights weights_of(
    const unsigned* words, const bf16* scales, const bf16* biases, size_t row, int inputs, int at, bool there) {
  if (!there) return {make_uint4(0, 0, 0, 0), 0, 0};
  const size_t group = row * (inputs / 64) + at / 64;
  const uint4* const from = reinterpret_cast<const uint4*>(words + (row * inputs + at) / 8);
  return {__ldcs(from), float(scales[group]), float(biases[group])};
}

// Their product with x, whose sum is `total`. Each number q becomes 128 + q.
__device__ inline float product(const Weights& weights, const float (&x)[LANE_WEIGHTS], float total) {
  float sum = 0;
  const unsigned words[4] = {weights.words.x, weights.words.y, weights.words.z, weights.words.w};
#pragma unroll
  for (int i = 0; i < LANE_WEIGHTS; i++) {
    const unsigned word = words[i / 8];
    const int bit = i % 8 * 4;
    const unsigned moved = bit <= 16 ? word << (16 - bit) : word >> (bit - 16);
    sum += __uint_as_float((moved & 0x000f0000u) | 0x43000000u) * x[i];
  }
  return weights.scale * sum + (weights.bias - 128 * weights.scale) * total;
}

// x from input `at` on, 32 numbers; 0 if they are not `there`.
__device__ inline void read_lane(float (&to)[LANE_WEIGHTS], const bf16* x, int at, bool there) {
#pragma unroll
  for (int i = 0; i < LANE_WEIGHTS / 8; i++) {
    const uint4 e = there ? reinterpret_cast<const uint4*>(x + at)[i] : make_uint4(0, 0, 0, 0);
    const unsigned words[4] = {e.x, e.y, e.z, e.w};
    for (int j = 0; j < 4; j++) {
      to[8 * i + 2 * j] = __uint_as_float(words[j] << 16);
      to[8 * i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
  }
}
