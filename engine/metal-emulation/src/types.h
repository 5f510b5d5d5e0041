// Before the text of a Metal kernel when clang checks its types, as C++ for OpenCL: address spaces
// are those of Metal, a pointer of one does not convert to another, and threadgroup memory is
// declared in the kernel's outermost scope.
//
// Declares what the metal namespace has and kernels may use. Functions of floats have overloads for
// half, as in Metal, so that a call with an integer is ambiguous here as well.

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define SHARED(T, name, n) threadgroup T name[n]

typedef __SIZE_TYPE__ size_t;
typedef unsigned long ulong;
typedef unsigned uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));

// Metal converts no float to a bfloat, unless it is cast. Neither does it here, nor the other way
// round.
enum class bfloat : ushort {};

#define OF_FLOATS_1(name) float name(float); half name(half);
#define OF_FLOATS_2(name) float name(float, float); half name(half, half);
#define OF_FLOATS_3(name) float name(float, float, float); half name(half, half, half);
#define OF_NUMBERS(T) T min(T, T); T max(T, T); T clamp(T, T, T); T abs(T);
#define OF_LANES(T) \
  T simd_sum(T); T simd_product(T); T simd_max(T); T simd_min(T); T simd_broadcast_first(T); \
  T simd_shuffle(T, ushort); T simd_shuffle_xor(T, ushort); T simd_broadcast(T, ushort); \
  T simd_shuffle_up(T, ushort); T simd_shuffle_down(T, ushort); \
  T simd_prefix_exclusive_sum(T); T simd_prefix_inclusive_sum(T);
#define OF_INTEGERS(T) \
  T simd_and(T); T simd_or(T); T simd_xor(T); T popcount(T); T clz(T); T ctz(T);
#define OF_EACH(list) list(float) list(half) list(int) list(uint) list(short) list(ushort)

OF_FLOATS_1(acos) OF_FLOATS_1(asin) OF_FLOATS_1(atan) OF_FLOATS_1(ceil) OF_FLOATS_1(cos)
OF_FLOATS_1(cosh) OF_FLOATS_1(exp) OF_FLOATS_1(exp2) OF_FLOATS_1(exp10) OF_FLOATS_1(fabs)
OF_FLOATS_1(floor) OF_FLOATS_1(fract) OF_FLOATS_1(log) OF_FLOATS_1(log2) OF_FLOATS_1(log10)
OF_FLOATS_1(rint) OF_FLOATS_1(round) OF_FLOATS_1(rsqrt) OF_FLOATS_1(sign) OF_FLOATS_1(sin)
OF_FLOATS_1(sinh) OF_FLOATS_1(sqrt) OF_FLOATS_1(tan) OF_FLOATS_1(tanh) OF_FLOATS_1(trunc)
OF_FLOATS_2(atan2) OF_FLOATS_2(copysign) OF_FLOATS_2(fmax) OF_FLOATS_2(fmin) OF_FLOATS_2(fmod)
OF_FLOATS_2(pow) OF_FLOATS_3(fma) OF_FLOATS_3(mix)
OF_EACH(OF_NUMBERS) OF_EACH(OF_LANES)
OF_INTEGERS(int) OF_INTEGERS(uint)
#define INFINITY __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define M_PI_F 3.14159265f
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool simd_all(bool);
bool simd_any(bool);
template <typename To, typename From> To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "types of one size");
  return __builtin_bit_cast(To, from);
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
