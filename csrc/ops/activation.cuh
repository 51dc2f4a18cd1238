// The formulas of activations for CUDA, with the sigmoid that they take: of float the fast one, of a few units in the
// last place.
#pragma once

namespace {

#include "activation_formulas.inc"

__device__ __forceinline__ float sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }
__device__ __forceinline__ double sigmoid(double z) { return 1.0 / (1.0 + exp(-z)); }

}  // namespace
