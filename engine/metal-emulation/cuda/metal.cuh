// Metal's names in CUDA, a simdgroup as a warp, and what the programs of this folder share.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../src/kernels/cuda/common.cuh"

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
template <class T> __device__ inline T simd_sum(T x) {
  for (int apart = 1; apart < 32; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
  return x;
}
template <class T> __device__ inline T simd_max(T x) {
  for (int apart = 1; apart < 32; apart *= 2) {
    const T other = __shfl_xor_sync(~0u, x, apart);
    x = x < other ? other : x;
  }
  return x;
}
template <class T> __device__ inline T simd_shuffle(T x, int lane) {
  return __shfl_sync(~0u, x, lane);
}
template <class T> __device__ inline T simd_shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}
template <class To, class From> __device__ inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
using uchar = unsigned char;
using bfloat = bf16;
using half = f16;

// Constants of texts are the bits of a float.
constexpr int EPSILON = 0x358637bd, ONE = 0x3f800000; // the bits of 1e-6 and of 1

// CUDA's own definition has the word `device` in it, which is empty from here on.
#undef __device__
#define __device__ __attribute__((__device__))
#define device
#define constant
#define threadgroup
#define thread
#define SHARED(T, name, n) __shared__ T name[n]
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_threadgroup threadIdx
#define thread_position_in_grid \
  make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
             blockIdx.z * blockDim.z + threadIdx.z)
#define threads_per_threadgroup blockDim
#define thread_index_in_threadgroup threadIdx.x
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)

inline float wide(float x) { return x; }
inline float wide(bf16 x) {
  const unsigned bits = unsigned(x.bits) << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline void set(float& to, float x) { to = x; }
inline void set(unsigned& to, float x) { to = unsigned(int(x * 8388608)) * 2654435761u; }
inline void set(int& to, float x) { to = int(x * 8388608); }
// Without rounding: only the reference reads it.
inline void set(bf16& to, float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  to.bits = static_cast<unsigned short>(bits >> 16);
}

// Between -1 and 1, the same in every run.
inline float random_float() {
  static unsigned seed = 1;
  seed = seed * 1664525 + 1013904223;
  return float(seed >> 8) / 8388608.f - 1;
}

// An array that host and device share, of random numbers or of bytes that are not a number.
template <class T> T* array(size_t count, bool filled = true) {
  T* data;
  if (cudaMallocManaged(&data, count * sizeof(T)) != cudaSuccess) {
    fprintf(stderr, "cannot allocate %zu bytes on the device\n", count * sizeof(T));
    exit(3);
  }
  memset(data, 0xff, count * sizeof(T));
  for (size_t i = 0; i < count && filled; i++) set(data[i], random_float());
  return data;
}
inline int* numbers_of(const std::vector<int>& numbers) {
  int* const data = array<int>(numbers.size(), false);
  memcpy(data, numbers.data(), numbers.size() * sizeof(int));
  return data;
}

// The largest difference from what is right, over the largest right value.
struct Worst {
  double most = 0, off = 0;
  void note(double ours, double right) {
    most = fmax(most, fabs(right));
    off = std::isnan(ours) ? INFINITY : fmax(off, fabs(ours - right));
  }
  double relative() const { return off / most; }
};

// Whether all checks of the program held.
inline bool all_hold = true;

// Waits for the launches before, and fails if one of them did.
inline void finish() {
  cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) status = cudaDeviceSynchronize();
  if (status != cudaSuccess) {
    fprintf(stderr, "a launch failed: %s\n", cudaGetErrorString(status));
    exit(3);
  }
}

inline void check(const char* name, double worst, double bound) {
  const bool holds = worst < bound;
  all_hold &= holds;
  printf("%s: off by %.1e, at most %.0e%s\n", name, worst, bound, holds ? "" : "  WRONG");
}

// Time of a launch, which is told its number.
template <class Launch> double microseconds(Launch launch) {
  constexpr int COUNT = 200;
  cudaEvent_t start, end;
  cudaEventCreate(&start), cudaEventCreate(&end);
  // All arrays of the timed launches come to the device.
  for (int i = 0; i < COUNT; i++) launch(i);
  cudaEventRecord(start);
  for (int i = 0; i < COUNT; i++) launch(i);
  cudaEventRecord(end);
  finish();
  float milliseconds;
  cudaEventElapsedTime(&milliseconds, start, end);
  return milliseconds * 1000 / COUNT;
}
