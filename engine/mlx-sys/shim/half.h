// Replaces mlx-c's half.h, which has 16-bit floats on ARM only, so that every platform has
// mlx_array_{item,data}_{float16,bfloat16}.
//
// Included first (`-include`), it sets the include guard of that header. bindgen reads it as C and
// generates two bytes for Rust; C++ gets the types that MLX computes with.

#pragma once

#define MLX_HALF_H
#define HAS_FLOAT16
#define HAS_BFLOAT16

#if !defined(__cplusplus)
#include <stdint.h>
typedef uint16_t float16_t;
typedef uint16_t bfloat16_t;
#elif defined(__aarch64__)
#include <arm_bf16.h>
#include <arm_fp16.h>
#else
#include "mlx/types/half_types.h"
using float16_t = mlx::core::float16_t;
using bfloat16_t = mlx::core::bfloat16_t;
#endif
