// Widens tokens for AVX2.
#define WIDEN widen_avx2
#include "widen.inc"
