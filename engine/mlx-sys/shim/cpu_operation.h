// An operation of MLX on the CPU that a function of ours computes: MLX's documented way to extend it, a Primitive.
//
// Included after mlx-c, whose handles it converts.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

extern "C" {

// An array while an operation runs. Rust's `View` in src/lib.rs has the same fields.
struct steersman_view {
  void* data;
  const int32_t* shape;
  const int64_t* strides;
  size_t dimensions;
  mlx_dtype dtype;
};

// Reads the inputs and fills the outputs, which follow them and are contiguous in row-major order. Runs on the thread
// of the stream.
typedef void (*steersman_function)(const steersman_view* views, size_t count, const int32_t* parameters);
}

namespace steersman {

using Parameters = std::vector<int32_t>;

class CpuOperation : public mlx::core::Primitive {
 public:
  CpuOperation(mlx::core::Stream stream, steersman_function function, Parameters parameters)
      : Primitive(stream), function_(function), parameters_(std::move(parameters)) {}

  void eval_cpu(
      const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override {
    using mlx::core::array;
    auto& encoder = mlx::core::cpu::get_command_encoder(stream());
    std::vector<array> arrays;
    for (const auto& input : inputs) {
      encoder.set_input_array(input);
      arrays.push_back(array::unsafe_weak_copy(input));
    }
    for (auto& output : outputs) {
      allocate(output);
      encoder.set_output_array(output);
      arrays.push_back(array::unsafe_weak_copy(output));
    }
    // MLX keeps the buffers until the stream has run what was dispatched.
    encoder.dispatch([arrays = std::move(arrays), function = function_, parameters = parameters_]() mutable {
      std::vector<steersman_view> views;
      for (auto& a : arrays) {
        views.push_back(
            {a.data<char>(), a.shape().data(), a.strides().data(), a.ndim(), mlx_dtype_to_c(a.dtype())});
      }
      function(views.data(), views.size(), parameters.data());
    });
  }

  void eval_gpu(const std::vector<mlx::core::array>&, std::vector<mlx::core::array>&) override {
    throw std::runtime_error("this operation runs on the CPU only");
  }

  const char* name() const override {
    return "CpuOperation";
  }

  bool is_equivalent(const Primitive& other) const override {
    const auto& same = static_cast<const CpuOperation&>(other);
    return function_ == same.function_ && parameters_ == same.parameters_;
  }

 private:
  // The buffer begins at a line of the caches, which those of MLX on a CPU do not: no vector crosses lines, and vectors
  // can be written past the caches.
  static void allocate(mlx::core::array& output) {
    constexpr size_t line = 64;
    auto buffer = mlx::core::allocator::malloc(output.nbytes() + line);
    auto past = reinterpret_cast<uintptr_t>(buffer.raw_ptr()) % line;
    output.set_data(buffer);
    auto strides = output.strides();
    auto skipped = (line - past) % line / output.itemsize();
    output.copy_shared_buffer(output, strides, output.flags(), output.size(), skipped);
  }

  steersman_function function_;
  Parameters parameters_;
};

} // namespace steersman

// Makes `results` arrays of `dtype`; `shapes` are their sizes one after another, `dimensions` how many each has.
extern "C" int steersman_cpu_operation(
    mlx_array* res,
    size_t results,
    const mlx_array* inputs,
    size_t count,
    const int32_t* shapes,
    const size_t* dimensions,
    mlx_dtype dtype,
    steersman_function function,
    const int32_t* parameters,
    size_t parameter_count,
    const mlx_stream stream) {
  try {
    std::vector<mlx::core::array> arrays;
    for (size_t i = 0; i < count; i++) {
      arrays.push_back(mlx_array_get_(inputs[i]));
    }
    steersman::Parameters copy(parameters, parameters + parameter_count);
    std::vector<mlx::core::Shape> sizes;
    for (size_t i = 0; i < results; i++) {
      sizes.emplace_back(shapes, shapes + dimensions[i]);
      shapes += dimensions[i];
    }
    auto primitive = std::make_shared<steersman::CpuOperation>(mlx_stream_get_(stream), function, std::move(copy));
    std::vector<mlx::core::Dtype> types(results, mlx_dtype_to_cpp(dtype));
    auto outputs = mlx::core::array::make_arrays(std::move(sizes), types, primitive, arrays);
    for (size_t i = 0; i < results; i++) {
      mlx_array_set_(res[i], std::move(outputs[i]));
    }
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}
