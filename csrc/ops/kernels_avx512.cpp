// The CPU loops for AVX-512.
#define KERNELS kernels_avx512
#include "kernels.inc"
