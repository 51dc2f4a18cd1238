// The CPU loops for any processor; those of aarch64 have NEON, as compilers know.
#define KERNELS kernels_base
#define VECTOR_BYTES 16
#include "kernels.inc"
