// What mlx-rs and Steersman need besides mlx-c. Compiled in the same file, after it.

#pragma once

#if !defined(__APPLE__)

#include <cstdint>
#include <cstdlib>
#include <ctime>

// MLX's CUDA backend caches 400 captured graphs and fails if more are in use, as in passes over one
// to eight rows. It reads this variable once; a value set by the user is kept. Set before main,
// when no thread reads the environment yet.
[[gnu::constructor]] static void keep_more_graphs() {
  setenv("MLX_CUDA_GRAPH_CACHE_SIZE", "4096", 0);
}

// mlx-rs seeds its random state with Apple's clock. Any clock in nanoseconds works.
extern "C" uint64_t mach_approximate_time() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000u + uint64_t(now.tv_nsec);
}

#endif

#if defined(STEERSMAN_OPENBLAS)

#include "shim/blas.h"

#else

extern "C" const char* steersman_blas() {
  return nullptr;
}

#endif
