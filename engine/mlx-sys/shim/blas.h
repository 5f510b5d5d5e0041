// OpenBLAS instead of the reference BLAS in MLX's Linux wheels.
//
// The wheel of OpenBLAS (scipy-openblas32) prefixes every name with `scipy_`. Each function below
// has the plain name, which libmlx calls, and jumps to OpenBLAS's. The dynamic linker searches the
// program before the libraries, so libmlx binds to these instead of the reference. No file is
// changed, and it works with every libmlx (CPU, CUDA).
//
// The list has all BLAS and LAPACK names of `nm -D --undefined-only libmlx.so` in MLX 0.32.2, which
// are equal in all four wheels. A name that is missing here resolves to the reference.

#pragma once

#if defined(__x86_64__)
#define JUMP(name) "jmp scipy_" #name "@PLT"
#else
#define JUMP(name) "b scipy_" #name
#endif

#define FORWARD(name)                    \
  asm(".text\n"                          \
      ".p2align 4\n"                     \
      ".globl " #name "\n"               \
      ".type " #name ", %function\n"     \
      #name ":\n"                        \
      JUMP(name) "\n"                    \
      ".size " #name ", .-" #name "\n");

FORWARD(cblas_sgemm) FORWARD(cblas_dgemm) FORWARD(cblas_cgemm)
FORWARD(sgeev_) FORWARD(dgeev_) FORWARD(cgeev_)
FORWARD(sgesdd_) FORWARD(dgesdd_) FORWARD(cgesdd_)
FORWARD(ssyevd_) FORWARD(dsyevd_) FORWARD(cheevd_)
FORWARD(sgeqrf_) FORWARD(dgeqrf_) FORWARD(sorgqr_) FORWARD(dorgqr_)
FORWARD(sgetrf_) FORWARD(dgetrf_) FORWARD(sgetri_) FORWARD(dgetri_)
FORWARD(spotrf_) FORWARD(dpotrf_) FORWARD(strtri_) FORWARD(dtrtri_)

#undef FORWARD
#undef JUMP

extern "C" const char* scipy_openblas_get_config();

extern "C" const char* steersman_blas() {
  return scipy_openblas_get_config();
}

extern "C" int scipy_openblas_get_num_threads();
extern "C" void scipy_openblas_set_num_threads(int);

extern "C" int steersman_blas_threads() {
  return scipy_openblas_get_num_threads();
}

extern "C" void steersman_set_blas_threads(int threads) {
  scipy_openblas_set_num_threads(threads);
}
