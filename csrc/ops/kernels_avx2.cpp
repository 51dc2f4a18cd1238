// The CPU loops for AVX2.
#define KERNELS kernels_avx2
#include "kernels.inc"
