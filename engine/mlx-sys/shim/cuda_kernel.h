// A compiled CUDA kernel as an operation of MLX.
//
// MLX's operation has a copy of the code. Operations do not change once they are made, so that launches with the same
// numbers and blocks share one.
//
// Included after mlx-c, whose handles it converts.

#pragma once

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/fast.h"

extern "C" {

// One launch. Rust's `CudaLaunch` in src/lib.rs has the same fields.
struct steersman_cuda_launch {
  // Name of the kernel, which ends with a zero byte, and the code (cubin). The process has one kernel of this name.
  const char* name;
  const char* code;
  size_t code_bytes;
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

namespace steersman {

// Most operations that a thread keeps.
constexpr size_t cuda_operations_limit = 1024;

// What all launches that share an operation have in common.
inline std::string cuda_operation_key(const steersman_cuda_launch& launch, int stream) {
  std::string key = launch.name;
  const auto append = [&](const void* data, size_t bytes) { key.append(static_cast<const char*>(data), bytes); };
  append(launch.numbers, launch.number_count * sizeof(int32_t));
  append(launch.blocks, sizeof(launch.blocks));
  append(&stream, sizeof(stream));
  return key;
}

} // namespace steersman

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
    static thread_local std::unordered_map<std::string, std::shared_ptr<mlx::core::Primitive>> operations;
    const auto key = steersman::cuda_operation_key(*launch, mlx_stream_get_(stream).index);
    std::vector<mlx::core::array> outputs;
    if (const auto known = operations.find(key); known != operations.end()) {
      outputs = mlx::core::array::make_arrays(std::move(shapes), types, known->second, arrays);
      for (size_t i = 0; i < results; i++) {
        mlx_array_set_(res[i], std::move(outputs[i]));
      }
      return 0;
    }
    std::vector<mlx::core::fast::ScalarArg> numbers(launch->numbers, launch->numbers + launch->number_count);
    const auto [x, y, z] = launch->blocks;
    outputs = mlx::core::fast::precompiled_cuda_kernel(
        launch->name,
        std::string(launch->code, launch->code_bytes),
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
    if (operations.size() == steersman::cuda_operations_limit) {
      operations.clear();
    }
    if (launch->code_bytes > 0) {
      operations.emplace(key, outputs[0].primitive_ptr());
    }
    for (size_t i = 0; i < results; i++) {
      mlx_array_set_(res[i], std::move(outputs[i]));
    }
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}
