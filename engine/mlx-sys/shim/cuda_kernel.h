// A compiled CUDA kernel as an operation of MLX.
//
// MLX gets a reference instead of the code (cuda_driver.h).
//
// Included after mlx-c, whose handles it converts.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mlx/fast.h"
#include "shim/cuda_driver.h"

extern "C" {

// One launch. Rust's `CudaLaunch` in src/lib.rs has the same fields.
struct steersman_cuda_launch {
  // Name of the kernel, which ends with a zero byte. The process has one kernel of this name.
  const char* name;
  // A cubin that lives as long as the process.
  const char* code;
  // Whether it waits for the kernel before it, and may start before that has ended.
  bool starts_early;
  // Sizes of the results one after another, how many each has, and their types.
  const int32_t* shapes;
  const size_t* dimensions;
  const mlx_dtype* types;
  // Integers that follow the pointers of inputs and results.
  const int32_t* numbers;
  size_t number_count;
  // Blocks along x, y and z, threads of a block along x, and its bytes of dynamic shared memory.
  int32_t blocks[3];
  int32_t threads;
  int32_t shared_bytes;
};
}

extern "C" int steersman_cuda_kernel(
    mlx_array* res,
    size_t results,
    const mlx_array* inputs,
    size_t count,
    const steersman_cuda_launch* launch,
    const mlx_stream stream) {
  try {
    std::vector<mlx::core::array> arrays;
    for (size_t i = 0; i < count; i++) {
      arrays.push_back(mlx_array_get_(inputs[i]));
    }
    std::vector<mlx::core::Shape> shapes;
    std::vector<mlx::core::Dtype> types;
    auto sizes = launch->shapes;
    for (size_t i = 0; i < results; i++) {
      shapes.emplace_back(sizes, sizes + launch->dimensions[i]);
      types.push_back(mlx_dtype_to_cpp(launch->types[i]));
      sizes += launch->dimensions[i];
    }
    std::vector<mlx::core::fast::ScalarArg> numbers(launch->numbers, launch->numbers + launch->number_count);
    const auto [x, y, z] = launch->blocks;
    auto outputs = mlx::core::fast::precompiled_cuda_kernel(
        launch->name,
        steersman::reference_to(launch->code, launch->starts_early),
        arrays,
        shapes,
        types,
        numbers,
        // MLX counts threads, not blocks.
        {x * launch->threads, y, z},
        {launch->threads, 1, 1},
        launch->shared_bytes,
        std::nullopt,
        /* ensure_row_contiguous */ true,
        mlx_stream_get_(stream));
    for (size_t i = 0; i < results; i++) {
      mlx_array_set_(res[i], std::move(outputs[i]));
    }
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}
