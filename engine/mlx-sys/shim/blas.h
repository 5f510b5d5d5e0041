// OpenBLAS in place of the reference BLAS that MLX's Linux wheels bring.
//
// The wheel of OpenBLAS (scipy-openblas32) puts `scipy_` before every name. Each function below has
// the plain name, which is what libmlx calls, and jumps to OpenBLAS's. The dynamic linker asks the
// program before any library, so libmlx finds these instead of the reference: no file is changed,
// and whichever libmlx the program is run with (CPU, CUDA) is served.
//
// The list is what `nm -D --undefined-only libmlx.so` shows of BLAS and LAPACK in MLX 0.32.2, the
// same in all four wheels. A name that is missing here still works: the reference has it.

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
