// OpenBLAS in the place of the reference BLAS that MLX's CPU wheel brings.
//
// The wheel of OpenBLAS (scipy-openblas32) puts `scipy_` before every name. Each function below has the plain name, which
// is the name that libmlx calls, and jumps to OpenBLAS's. The dynamic linker looks in the program before it looks in any
// library, so libmlx finds these and not the reference; no library is changed, and MLX's CUDA build is served as well.
//
// The list is what `nm -D --undefined-only libmlx.so` shows of BLAS and LAPACK in MLX 0.32.2, the same on each platform.
// A function that is missing here still works: libmlx takes it from the reference.

#pragma once

#if defined(__x86_64__)
#define JUMP "jmp scipy_"
#define PLT "@PLT\n"
#else
#define JUMP "b scipy_"
#define PLT "\n"
#endif

#define FORWARD(name)                                                       \
  asm(".text\n.p2align 4\n.globl " #name "\n.type " #name ", %function\n" #name \
      ":\n" JUMP #name PLT ".size " #name ", .-" #name "\n");

FORWARD(cblas_sgemm) FORWARD(cblas_dgemm) FORWARD(cblas_cgemm)
FORWARD(sgeev_) FORWARD(dgeev_) FORWARD(cgeev_)
FORWARD(sgesdd_) FORWARD(dgesdd_) FORWARD(cgesdd_)
FORWARD(ssyevd_) FORWARD(dsyevd_) FORWARD(cheevd_)
FORWARD(sgeqrf_) FORWARD(dgeqrf_) FORWARD(sorgqr_) FORWARD(dorgqr_)
FORWARD(sgetrf_) FORWARD(dgetrf_) FORWARD(sgetri_) FORWARD(dgetri_)
FORWARD(spotrf_) FORWARD(dpotrf_) FORWARD(strtri_) FORWARD(dtrtri_)

#undef FORWARD
#undef PLT
#undef JUMP

extern "C" const char* scipy_openblas_get_config();

// Asked when the program is loaded, so that the linker keeps OpenBLAS even where nobody asks for its name.
static const char* const openblas_config = scipy_openblas_get_config();

extern "C" const char* steersman_blas() {
  return openblas_config;
}
