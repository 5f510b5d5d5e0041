#define ATTENTION BODY
#define JOIN "../../src/kernels/metal/attention_join.metal"
#include "attention.cuh"
