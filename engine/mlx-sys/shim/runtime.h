// What mlx-rs and Steersman need beside mlx-c. Compiled behind it, in the same file.

#pragma once

#if !defined(__APPLE__)

#include <cstdint>
#include <cstdlib>
#include <ctime>

// MLX's CUDA backend keeps 400 captured graphs and fails when more than that take turns, as they do
// in passes over one to eight rows. It reads this once; what the user has set stays. Before main,
// since no thread reads the environment then.
[[gnu::constructor]] static void keep_more_graphs() {
  setenv("MLX_CUDA_GRAPH_CACHE_SIZE", "4096", 0);
}

// mlx-rs seeds its random state with Apple's clock. Any clock in nanoseconds does.
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
