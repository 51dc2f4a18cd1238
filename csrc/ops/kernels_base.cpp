// The CPU loops for any x86-64.
#define KERNELS kernels_base
#include "kernels.inc"
