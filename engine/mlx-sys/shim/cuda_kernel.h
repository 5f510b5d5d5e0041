// Launches of compiled CUDA kernels as operations of MLX.
//
// MLX takes 5 us of the host for an operation, more than many kernels run. So a launch that reads the results of another
// one joins that one's operation, if it is not evaluated yet and depends on nothing else that is not.
//
// Included after mlx-c, whose handles it converts.

#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/fast.h"
#include "mlx/primitives.h"
#include "shim/cuda_driver.h"

extern "C" {

// One launch. Rust's `RawLaunch` in src/lib.rs has the same fields.
struct steersman_cuda_launch {
  steersman_cuda_code* code;
  // Sizes of the results one after another, how many each has, and their types.
  const int32_t* shapes;
  const size_t* dimensions;
  const mlx_dtype* types;
  // Integers that follow the pointers of inputs and results.
  const int32_t* numbers;
  size_t number_count;
  // Blocks along x, y and z, and threads of a block along x. No blocks: the code is loaded only.
  int32_t blocks[3];
  int32_t threads;
  // The code (cubin) of an empty kernel `steersman_carrier` for the device.
  const char* carrier;
  size_t carrier_bytes;
};
}

namespace steersman {

class CudaLaunches : public mlx::core::Primitive {
 public:
  CudaLaunches(mlx::core::Stream stream, std::string carrier) : Primitive(stream), carrier_(std::move(carrier)) {}

  void eval_cpu(const std::vector<mlx::core::array>&, std::vector<mlx::core::array>&) override {
    throw std::runtime_error("this operation runs on CUDA only");
  }

  void eval_gpu(
      const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs) override {
    std::vector<mlx::core::Shape> shapes;
    std::vector<mlx::core::Dtype> types;
    for (const auto& output : outputs) {
      shapes.push_back(output.shape());
      types.push_back(output.dtype());
    }
    const auto launches = placed(inputs.size());
    auto operation = mlx::core::fast::precompiled_cuda_kernel(
        carrier_name,
        carrier_,
        inputs,
        shapes,
        types,
        /* scalars */ {},
        /* threads */ {1, 1, 1},
        /* threads of a block */ {1, 1, 1},
        /* shared_memory */ 0,
        std::nullopt,
        /* ensure_row_contiguous */ true,
        stream());
    carried = &launches;
    operation.front().primitive().eval_gpu(inputs, outputs);
    if (std::exchange(carried, nullptr)) {
      throw std::runtime_error("MLX has not launched the kernels: is MLX_USE_CUDA_GRAPHS 1?");
    }
  }

  const char* name() const override {
    return "CudaLaunches";
  }

  bool is_equivalent(const Primitive&) const override {
    return false;
  }

  // Appends a launch. Arrays are numbered as in `Places`.
  void append(CudaLaunch launch, std::vector<int64_t> places) {
    launches_.push_back(std::move(launch));
    places_.push_back(std::move(places));
  }

  size_t size() const {
    return launches_.size();
  }

 private:
  // The launches with the places of their arrays among the inputs and, after them, the results.
  std::vector<CudaLaunch> placed(size_t inputs) const {
    auto launches = launches_;
    for (size_t i = 0; i < launches.size(); i++) {
      for (auto place : places_[i]) {
        launches[i].arrays.push_back(place >= 0 ? place : inputs + ~place);
      }
    }
    return launches;
  }

  std::string carrier_;
  std::vector<CudaLaunch> launches_;
  // Of the arrays of each launch: the index of an input, or the complement (~) of that of a result.
  std::vector<std::vector<int64_t>> places_;
};

// Most launches and results of an operation. Its results are freed when all of it has run.
constexpr size_t most_launches = 12, most_results = 24, most_result_bytes = 16 << 20;

inline CudaLaunches* launches_of(const mlx::core::array& a) {
  return a.has_primitive() ? dynamic_cast<CudaLaunches*>(&a.primitive()) : nullptr;
}

inline bool is_unevaluated(const mlx::core::array& a) {
  return a.has_primitive() && a.status() == mlx::core::array::Status::unscheduled;
}

// An array of the operation that a launch with these inputs can join, if there is one. Inputs that are not evaluated
// must be its results: others might depend on these.
inline const mlx::core::array* joinable(
    const std::vector<mlx::core::array>& inputs, size_t results, size_t bytes, mlx::core::Stream stream) {
  const mlx::core::array* own = nullptr;
  for (const auto& input : inputs) {
    if (!is_unevaluated(input)) {
      continue;
    }
    if (!launches_of(input) || (own && own->primitive_id() != input.primitive_id())) {
      return nullptr;
    }
    own = &input;
  }
  if (!own || own->primitive().stream() != stream || launches_of(*own)->size() >= most_launches ||
      own->siblings().size() + 1 + results > most_results) {
    return nullptr;
  }
  for (const auto& result : own->outputs()) {
    bytes += result.nbytes();
  }
  return bytes <= most_result_bytes ? own : nullptr;
}

// Makes `results` of the operation with further inputs and results: all of them know all of these.
inline void extend(
    std::vector<mlx::core::array>& results,
    const std::vector<mlx::core::array>& inputs,
    std::vector<mlx::core::array> further) {
  const auto before = results.size();
  results.insert(results.end(), further.begin(), further.end());
  for (size_t i = 0; i < before; i++) {
    auto& siblings = results[i].siblings();
    siblings.insert(siblings.end(), further.begin(), further.end());
    results[i].inputs() = inputs;
  }
  for (auto i = before; i < results.size(); i++) {
    auto siblings = results;
    siblings.erase(siblings.begin() + i);
    results[i].set_siblings(std::move(siblings), i);
  }
}

inline std::vector<mlx::core::array> launch_later(
    const std::vector<mlx::core::array>& inputs,
    const std::vector<mlx::core::Shape>& shapes,
    const std::vector<mlx::core::Dtype>& types,
    CudaLaunch launch,
    const steersman_cuda_launch& raw,
    mlx::core::Stream stream) {
  using mlx::core::array;
  size_t bytes = 0;
  for (size_t i = 0; i < shapes.size(); i++) {
    size_t size = mlx::core::size_of(types[i]);
    for (auto dimension : shapes[i]) {
      size *= dimension;
    }
    bytes += size;
  }
  const auto* own = joinable(inputs, shapes.size(), bytes, stream);
  std::vector<array> results, all_inputs;
  std::shared_ptr<mlx::core::Primitive> operation;
  if (own) {
    results = own->outputs();
    all_inputs = own->inputs();
    operation = own->primitive_ptr();
  } else {
    operation = std::make_shared<CudaLaunches>(stream, std::string(raw.carrier, raw.carrier_bytes));
  }
  auto place_of = [](std::vector<array>& among, const array& a) -> int64_t {
    auto same = [&a](const array& other) { return other.id() == a.id(); };
    return std::find_if(among.begin(), among.end(), same) - among.begin();
  };
  std::vector<int64_t> places;
  for (const auto& input : inputs) {
    if (const auto result = place_of(results, input); size_t(result) < results.size()) {
      places.push_back(~result);
      continue;
    }
    const auto place = place_of(all_inputs, input);
    if (size_t(place) == all_inputs.size()) {
      all_inputs.push_back(input);
    }
    places.push_back(place);
  }
  std::vector<array> further;
  for (size_t i = 0; i < shapes.size(); i++) {
    places.push_back(~int64_t(results.size() + i));
    further.emplace_back(shapes[i], types[i], operation, all_inputs);
  }
  static_cast<CudaLaunches&>(*operation).append(std::move(launch), std::move(places));
  extend(results, all_inputs, further);
  return further;
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
    steersman::CudaLaunch own{
        launch->code,
        {},
        {launch->numbers, launch->numbers + launch->number_count},
        {uint32_t(launch->blocks[0]), uint32_t(launch->blocks[1]), uint32_t(launch->blocks[2])},
        uint32_t(launch->threads)};
    auto outputs =
        steersman::launch_later(arrays, shapes, types, std::move(own), *launch, mlx_stream_get_(stream));
    for (size_t i = 0; i < results; i++) {
      mlx_array_set_(res[i], std::move(outputs[i]));
    }
  } catch (std::exception& e) {
    mlx_error(e.what());
    return 1;
  }
  return 0;
}
