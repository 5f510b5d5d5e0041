#define ATTENTION "../../src/kernels/metal/attention.metal"
#define JOIN BODY
#include "attention.cuh"
