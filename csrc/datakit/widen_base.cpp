// Widens tokens for any processor.
#define WIDEN widen_base
#include "widen.inc"
