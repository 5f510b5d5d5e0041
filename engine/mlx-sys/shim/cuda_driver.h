// Functions of CUDA's driver that stand before the driver's own: the dynamic linker searches the program before the
// libraries, so that libmlx calls these. They do what MLX's operation for compiled kernels (cuda_kernel.h) lacks, for
// our kernels only; MLX's own kernels and modules are passed on as they are.
//
// 1. Code is given to MLX as a reference of a few bytes. MLX hashes the code at each launch, which takes microseconds
//    for the 30 to 50 kB of a kernel.
// 2. A kernel may start before the one before it has ended (programmatic dependent launch, "Programmatic Dependent
//    Launch and Synchronization" of the CUDA programming guide). Ours wait for it themselves, with
//    `griddepcontrol.wait`, after they have read weights. Only with compute capability 9.0 and higher, and only where MLX
//    launches kernels one by one: it builds graphs by another function.
//
// The program must export these functions (rpath.rs). Types have the layout of cuda.h, which is not installed where we
// build.

#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>
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

int cuModuleLoadDataEx(void** module, const void* image, unsigned count, int* options, void** values);
int cuModuleGetFunction(void** function, void* module, const char* name);
int cuLaunchKernelEx(const steersman_cu_launch* config, void* function, void** parameters, void** extra);
}

namespace steersman {

// Code that lives as long as the process.
struct CodeReference {
  static constexpr char expected_mark[16] = "steersman code\n";
  char mark[16];
  const char* code;
  // Whether its kernels wait for the one before them. As wide as the pointer, so that there is no padding: MLX compares
  // the bytes.
  uint64_t starts_early;
};

inline std::string reference_to(const char* code, bool starts_early) {
  CodeReference reference{{}, code, starts_early};
  std::memcpy(reference.mark, CodeReference::expected_mark, sizeof(reference.mark));
  return std::string(reinterpret_cast<const char*>(&reference), sizeof(reference));
}

// Modules and kernels that start early, as the driver knows them.
struct CudaHandles {
  std::mutex mutex;
  std::unordered_set<const void*> all;

  // The driver may give a new module or kernel the handle of one that is unloaded.
  void set(const void* handle, bool starts_early) {
    std::lock_guard lock(mutex);
    if (starts_early) {
      all.insert(handle);
    } else {
      all.erase(handle);
    }
  }

  bool has(const void* handle) {
    std::lock_guard lock(mutex);
    return all.count(handle) > 0;
  }
};

inline CudaHandles& cuda_handles() {
  // Never destroyed: the driver may be called while the process ends.
  static auto& handles = *new CudaHandles;
  return handles;
}

// The driver's function; null if there is no driver.
template <typename Function>
Function* driver_function(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

constexpr int cu_error_not_found = 500; // CUDA_ERROR_NOT_FOUND
constexpr int cu_programmatic_stream_serialization = 6; // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

} // namespace steersman

extern "C" int cuModuleLoadDataEx(void** module, const void* image, unsigned count, int* options, void** values) {
  using steersman::CodeReference;
  static const auto driver = steersman::driver_function(cuModuleLoadDataEx, "cuModuleLoadDataEx");
  if (!driver) {
    return steersman::cu_error_not_found;
  }
  bool starts_early = false;
  if (std::memcmp(image, CodeReference::expected_mark, sizeof(CodeReference::expected_mark)) == 0) {
    const auto* reference = static_cast<const CodeReference*>(image);
    image = reference->code;
    starts_early = reference->starts_early;
  }
  const auto status = driver(module, image, count, options, values);
  if (status == 0) {
    steersman::cuda_handles().set(*module, starts_early);
  }
  return status;
}

extern "C" int cuModuleGetFunction(void** function, void* module, const char* name) {
  static const auto driver = steersman::driver_function(cuModuleGetFunction, "cuModuleGetFunction");
  if (!driver) {
    return steersman::cu_error_not_found;
  }
  const auto status = driver(function, module, name);
  if (status == 0) {
    steersman::cuda_handles().set(*function, steersman::cuda_handles().has(module));
  }
  return status;
}

extern "C" int cuLaunchKernelEx(
    const steersman_cu_launch* config, void* function, void** parameters, void** extra) {
  static const auto driver = steersman::driver_function(cuLaunchKernelEx, "cuLaunchKernelEx");
  if (!driver) {
    return steersman::cu_error_not_found;
  }
  if (!steersman::cuda_handles().has(function)) {
    return driver(config, function, parameters, extra);
  }
  std::vector<steersman_cu_attribute> attributes(
      config->attributes, config->attributes + config->attribute_count);
  attributes.push_back({steersman::cu_programmatic_stream_serialization, 0, {1}});
  auto own = *config;
  own.attributes = attributes.data();
  own.attribute_count = attributes.size();
  return driver(&own, function, parameters, extra);
}

// Whether libmlx calls the functions above.
extern "C" bool steersman_cuda_launches() {
  return dlsym(RTLD_DEFAULT, "cuLaunchKernelEx") == reinterpret_cast<void*>(&cuLaunchKernelEx);
}
