// An operation of MLX on the CPU that a function of ours computes: MLX's documented way to extend it, a Primitive.
//
// Included after mlx-c, whose handles it converts.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
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
// of the stream, or on the caller's.
typedef void (*steersman_function)(const steersman_view* views, size_t count, const int32_t* parameters);
}

namespace steersman {

using Parameters = std::vector<int32_t>;
using Arrays = std::vector<mlx::core::array>;

// The buffer begins at a line of the caches, which those of MLX on a CPU do not: no vector crosses lines, and vectors
// can be written past the caches.
inline void allocate(mlx::core::array& output) {
  constexpr size_t line = 64;
  auto buffer = mlx::core::allocator::malloc(output.nbytes() + line);
  auto past = reinterpret_cast<uintptr_t>(buffer.raw_ptr()) % line;
  output.set_data(buffer);
  auto strides = output.strides();
  auto skipped = (line - past) % line / output.itemsize();
  output.copy_shared_buffer(output, strides, output.flags(), output.size(), skipped);
}

// Calls the function with views of arrays that have data.
inline void call(steersman_function function, const int32_t* parameters, Arrays& arrays) {
  std::vector<steersman_view> views;
  views.reserve(arrays.size());
  for (auto& a : arrays) {
    views.push_back({a.data<char>(), a.shape().data(), a.strides().data(), a.ndim(), mlx_dtype_to_c(a.dtype())});
  }
  function(views.data(), views.size(), parameters);
}

inline bool all_available(const Arrays& arrays) {
  for (const auto& a : arrays) {
    if (!a.is_available()) {
      return false;
    }
  }
  return true;
}

// An array without an operation, whose data are there once they are written.
inline mlx::core::array with_data(mlx::core::Shape shape, mlx::core::Dtype type) {
  mlx::core::array a(std::move(shape), type, nullptr, Arrays{});
  a.set_status(mlx::core::array::Status::available);
  return a;
}

class CpuOperation : public mlx::core::Primitive {
 public:
  CpuOperation(mlx::core::Stream stream, steersman_function function, Parameters parameters)
      : Primitive(stream), function_(function), parameters_(std::move(parameters)) {}

  void eval_cpu(
      const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override {
    using mlx::core::array;
    auto& encoder = mlx::core::cpu::get_command_encoder(stream());
    Arrays arrays;
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
      call(function, parameters.data(), arrays);
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
  steersman_function function_;
  Parameters parameters_;
};

} // namespace steersman

// Makes `results` arrays of `dtype`; `shapes` are their sizes one after another, `dimensions` how many each has. With
// `at_once`, and if all inputs are available, the function runs before this one returns.
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
    bool at_once,
    const mlx_stream stream) {
  try {
    steersman::Arrays arrays;
    arrays.reserve(count + results);
    for (size_t i = 0; i < count; i++) {
      arrays.push_back(mlx_array_get_(inputs[i]));
    }
    auto type = mlx_dtype_to_cpp(dtype);
    std::vector<mlx::core::Shape> sizes;
    for (size_t i = 0; i < results; i++) {
      sizes.emplace_back(shapes, shapes + dimensions[i]);
      shapes += dimensions[i];
    }
    if (at_once && steersman::all_available(arrays)) {
      for (auto& shape : sizes) {
        arrays.push_back(steersman::with_data(std::move(shape), type));
        steersman::allocate(arrays.back());
      }
      steersman::call(function, parameters, arrays);
      for (size_t i = 0; i < results; i++) {
        mlx_array_set_(res[i], std::move(arrays[count + i]));
      }
      return 0;
    }
    steersman::Parameters copy(parameters, parameters + parameter_count);
    auto primitive = std::make_shared<steersman::CpuOperation>(mlx_stream_get_(stream), function, std::move(copy));
    std::vector<mlx::core::Dtype> types(results, type);
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

// Whether the data of an array are there: computing it is over.
extern "C" bool steersman_is_available(const mlx_array array) {
  return mlx_array_get_(array).is_available();
}

// Number of operations that MLX runs to evaluate an array.
extern "C" size_t steersman_operations(const mlx_array array) {
  std::unordered_set<std::uintptr_t> operations, seen;
  std::vector<const mlx::core::array*> left{&mlx_array_get_(array)};
  while (!left.empty()) {
    const auto& a = *left.back();
    left.pop_back();
    if (a.status() != mlx::core::array::Status::unscheduled || !a.has_primitive() || !seen.insert(a.id()).second) {
      continue;
    }
    operations.insert(a.primitive_id());
    for (const auto& input : a.inputs()) {
      left.push_back(&input);
    }
  }
  return operations.size();
}

// The array with another shape of as many elements. At once if its data are there and contiguous.
extern "C" int steersman_reshape(
    mlx_array* res, const mlx_array input, const int32_t* shape, size_t dimensions, const mlx_stream stream) {
  try {
    const auto& a = mlx_array_get_(input);
    mlx::core::Shape sizes(shape, shape + dimensions);
    size_t size = 1;
    for (auto dimension : sizes) {
      size *= dimension;
    }
    if (size == a.size() && a.is_available() && a.flags().row_contiguous) {
      auto view = steersman::with_data(std::move(sizes), a.dtype());
      view.copy_shared_buffer(a, view.strides(), a.flags(), a.data_size());
      mlx_array_set_(*res, std::move(view));
    } else {
      mlx_array_set_(*res, mlx::core::reshape(a, std::move(sizes), mlx_stream_get_(stream)));
    }
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}
