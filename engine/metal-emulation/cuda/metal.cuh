// Metal's names for a text that is compiled as a CUDA kernel: a simdgroup is a warp. run.sh takes
// the address spaces out of the text.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../../src/kernels/cuda/common.cuh"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline float simd_sum(float x) {
  for (int apart = 1; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}
template <class X>
__device__ inline X simd_max(X x) {
  for (int apart = 1; apart < 32; apart *= 2) x = max(x, __shfl_xor_sync(~0u, x, apart));
  return x;
}
template <class To>
__device__ inline To as_type(int x) {
  return __int_as_float(x);
}

#define SHARED(T, name, n) __shared__ T name[n]
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_threadgroup threadIdx
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)

static unsigned seed = 1;
static unsigned random_bits() {
  seed = seed * 1664525 + 1013904223;
  return seed;
}
static float random_float() { return (random_bits() >> 8) / 8388608.f - 1; }
static float wide(bf16 x) {
  unsigned bits = unsigned(x.bits) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
static float wide(float x) { return x; }
static void set(float& to, float x) { to = x; }
static void set(bf16& to, float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  to.bits = static_cast<unsigned short>(bits >> 16);
}
static void set(unsigned& to, float) { to = random_bits() ^ random_bits() >> 15; }
template <class T>
static T* array(size_t count, bool filled = true) {
  T* data;
  cudaMallocManaged(&data, count * sizeof(T));
  for (size_t i = 0; i < count && filled; i++) set(data[i], random_float());
  return data;
}

// Microseconds of a call of `launch`, which gets the number of the call.
template <class F>
static double microseconds(F launch) {
  cudaEvent_t start, end;
  cudaEventCreate(&start), cudaEventCreate(&end);
  // All that the calls read is on the device before the clock starts.
  for (int i = 0; i < 300; i++) launch(i);
  cudaEventRecord(start);
  for (int i = 0; i < 200; i++) launch(i);
  cudaEventRecord(end);
  cudaEventSynchronize(end);
  float milliseconds;
  cudaEventElapsedTime(&milliseconds, start, end);
  return milliseconds * 1000 / 200;
}
