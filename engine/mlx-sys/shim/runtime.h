// What mlx-rs and Steersman need besides mlx-c. Compiled in the same file, after it.

#pragma once

#if !defined(__APPLE__)

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>

// MLX's CUDA backend caches 400 captured graphs, fewer than passes over one to eight rows use. After
// twice as many misses in the life of a process it throws at every further miss ("Cache thrashing is
// happening"), which a server with many prompt lengths reaches in days.
//
// Kernels are launched one by one, not as graphs. MLX updates a graph of the same form instead of making a new one, which
// leaves the size of clusters as it was, and knows no kernel that starts before the last one has ended
// (cuda_driver.h). MLX frees what operations have read, and reports it to a thread, after so many operations. With 20 of
// them instead of 400, one stream of a 9B shape on an H100 lost 6 % of its tokens/s; what is not freed takes memory.
//
// With graphs, these are the operations of a graph. CUDA takes 4 to 20 ms to instantiate one of 100, MLX's default on an
// H100, and a pass with other sequences or prompts than the last has 50 to 100 new graphs. Graphs of 20 operations
// repeat from layer to layer.
//
// MLX reads each variable once; values set by the user are kept. Set before main, when no thread reads the
// environment yet.
[[gnu::constructor]] static void configure_cuda() {
  setenv("MLX_CUDA_GRAPH_CACHE_SIZE", "4096", 0);
  setenv("MLX_ENABLE_CACHE_THRASHING_CHECK", "0", 0);
  setenv("MLX_USE_CUDA_GRAPHS", "0", 0);
  const bool has_graphs = std::strcmp(std::getenv("MLX_USE_CUDA_GRAPHS"), "0") != 0;
  setenv("MLX_MAX_OPS_PER_BUFFER", has_graphs ? "20" : "100", 0);
}

// mlx-rs seeds its random state with Apple's clock. Any clock in nanoseconds works.
extern "C" uint64_t mach_approximate_time() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000u + uint64_t(now.tv_nsec);
}

#endif

#include "shim/cpu_operation.h"
#include "shim/cuda_kernel.h"

#if defined(STEERSMAN_OPENBLAS)

#include "shim/blas.h"

#else

extern "C" const char* steersman_blas() {
  return nullptr;
}

extern "C" int steersman_blas_threads() {
  return 0;
}

extern "C" void steersman_set_blas_threads(int) {}

#endif
