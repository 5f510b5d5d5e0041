// Functions of CUDA's driver that stand before the driver's own: the dynamic linker searches the program before the
// libraries, so that libmlx calls these. MLX has one operation for a compiled kernel, and it launches that kernel alone.
// Ours is an empty kernel, the carrier; when MLX launches it, the launches of a `CudaLaunches` (cuda_kernel.h) take its
// place, with the addresses of the arrays that MLX has passed. All other kernels are passed on as they are.
//
// Launches of ours may start before the kernel before them has ended (programmatic dependent launch, "Programmatic Dependent
// Launch and Synchronization" of the CUDA programming guide). They wait for it themselves, with `griddepcontrol.wait`,
// after they have read weights. Only with compute capability 9.0 and higher.
//
// The program must export these functions (rpath.rs). Types have the layout of cuda.h, which is not installed where we
// build.

#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

extern "C" {

// CUlaunchAttribute.
struct steersman_cu_attribute {
  int32_t id;
  int32_t padding;
  union {
    int32_t number;
    uint64_t largest[8];
  } value;
};

// CUlaunchConfig.
struct steersman_cu_launch {
  uint32_t blocks[3];
  uint32_t threads[3];
  uint32_t shared_bytes;
  void* stream;
  const steersman_cu_attribute* attributes;
  uint32_t attribute_count;
};

// A compiled kernel, which lives as long as the process. Rust's `CudaCode` in src/lib.rs has the same fields.
struct steersman_cuda_code {
  // Name of the kernel, which ends with a zero byte.
  const char* name;
  // A cubin.
  const char* code;
  // Most bytes of dynamic shared memory of a block.
  int32_t shared_bytes;
  // Whether it waits for the kernel before it, and may start before that has ended.
  bool starts_early;
  // The driver's handle; null until it is loaded.
  std::atomic<void*> function;
};

int cuModuleGetFunction(void** function, void* module, const char* name);
int cuLaunchKernelEx(const steersman_cu_launch* config, void* function, void** parameters, void** extra);
}

namespace steersman {

// One launch among those of an operation.
struct CudaLaunch {
  steersman_cuda_code* code;
  // Places of its inputs and results among the arrays of the operation.
  std::vector<uint32_t> arrays;
  // Integers that follow the pointers of the arrays.
  std::vector<int32_t> numbers;
  // Blocks along x, y and z. None: the code is loaded only.
  uint32_t blocks[3];
  uint32_t threads;
};

// The launches that take the place of the carrier's next launch on this thread; null when they have.
inline thread_local const std::vector<CudaLaunch>* carried = nullptr;

constexpr const char* carrier_name = "steersman_carrier";

inline std::atomic<void*>& carrier() {
  static std::atomic<void*> function = nullptr;
  return function;
}

constexpr int cu_error_not_found = 500; // CUDA_ERROR_NOT_FOUND
constexpr int cu_max_dynamic_shared_bytes = 8; // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int cu_programmatic_stream_serialization = 6; // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// Calls the driver's function `name`, of type `Function`.
template <typename Function, typename... Arguments>
int driver(const char* name, void*& function, Arguments... arguments) {
  if (!function) {
    function = dlsym(RTLD_NEXT, name);
  }
  return function ? reinterpret_cast<Function*>(function)(arguments...) : cu_error_not_found;
}

inline int driver_get_function(void** function, void* module, const char* name) {
  static void* own = nullptr;
  return driver<decltype(cuModuleGetFunction)>("cuModuleGetFunction", own, function, module, name);
}

inline int driver_launch(const steersman_cu_launch* config, void* function, void** parameters, void** extra) {
  static void* own = nullptr;
  return driver<decltype(cuLaunchKernelEx)>("cuLaunchKernelEx", own, config, function, parameters, extra);
}

// Loads the code. The device's context is current. Two threads may load it twice, which is harmless.
inline int load(steersman_cuda_code& code) {
  static void *load_data = nullptr, *set_attribute = nullptr;
  void *module = nullptr, *function = nullptr;
  auto status = driver<int(void**, const void*)>(
      "cuModuleLoadData", load_data, &module, static_cast<const void*>(code.code));
  if (status == 0) {
    status = driver_get_function(&function, module, code.name);
  }
  if (status == 0 && code.shared_bytes > 0) {
    status = driver<int(void*, int, int)>(
        "cuFuncSetAttribute", set_attribute, function, cu_max_dynamic_shared_bytes, int(code.shared_bytes));
  }
  if (status == 0) {
    code.function = function;
  }
  return status;
}

inline int launch(const CudaLaunch& launch, void* stream, void** arrays) {
  auto& code = *launch.code;
  if (!code.function) {
    if (const auto status = load(code)) {
      return status;
    }
  }
  if (launch.blocks[0] == 0) {
    return 0;
  }
  thread_local std::vector<void*> parameters;
  parameters.clear();
  for (auto place : launch.arrays) {
    parameters.push_back(arrays[place]);
  }
  for (const auto& number : launch.numbers) {
    parameters.push_back(const_cast<int32_t*>(&number));
  }
  const auto [x, y, z] = launch.blocks;
  const steersman_cu_attribute early{cu_programmatic_stream_serialization, 0, {1}};
  const steersman_cu_launch config{
      {x, y, z}, {launch.threads, 1, 1}, uint32_t(code.shared_bytes), stream, &early, code.starts_early ? 1u : 0u};
  return driver_launch(&config, code.function, parameters.data(), nullptr);
}

} // namespace steersman

extern "C" int cuModuleGetFunction(void** function, void* module, const char* name) {
  const auto status = steersman::driver_get_function(function, module, name);
  if (status == 0 && std::strcmp(name, steersman::carrier_name) == 0) {
    steersman::carrier() = *function;
  }
  return status;
}

extern "C" int cuLaunchKernelEx(
    const steersman_cu_launch* config, void* function, void** parameters, void** extra) {
  const auto* launches = steersman::carried;
  if (!launches || function != steersman::carrier()) {
    return steersman::driver_launch(config, function, parameters, extra);
  }
  steersman::carried = nullptr;
  for (const auto& launch : *launches) {
    if (const auto status = steersman::launch(launch, config->stream, parameters)) {
      return status;
    }
  }
  return 0;
}

// Whether libmlx calls the functions above.
extern "C" bool steersman_cuda_launches() {
  return dlsym(RTLD_DEFAULT, "cuLaunchKernelEx") == reinterpret_cast<void*>(&cuLaunchKernelEx);
}
