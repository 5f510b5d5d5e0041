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
