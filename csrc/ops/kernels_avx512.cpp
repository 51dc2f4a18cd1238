// The CPU loops for AVX-512.
#define KERNELS kernels_avx512
#define VECTOR_BYTES 64
#include "kernels.inc"
