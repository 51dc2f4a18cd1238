// The CPU loops for any x86-64.
#define KERNELS kernels_base
#define VECTOR_BYTES 16
#include "kernels.inc"
