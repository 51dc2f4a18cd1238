// The CPU loops for AVX2.
#define KERNELS kernels_avx2
#define VECTOR_BYTES 32
#include "kernels.inc"
