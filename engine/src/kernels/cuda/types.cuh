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
