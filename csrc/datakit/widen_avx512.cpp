// Widens tokens for AVX-512.
#define WIDEN widen_avx512
#include "widen.inc"
