// Normals of a box on CUDA, a thread an element. Built without fused multiply-adds: the bits are the CPU's.
#include "box.h"
#include "device.cuh"
#include "philox.h"

namespace {

__device__ __forceinline__ uint64_t bits_of(double value) {
  return static_cast<uint64_t>(__double_as_longlong(value));
}
__device__ __forceinline__ double double_of(uint64_t bits) {
  return __longlong_as_double(static_cast<long long>(bits));
}

#include "normal_formulas.inc"

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) normal_box(T* out, uint64_t key, Box box, double std) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < box.num_elements; i += step) {
    const auto index = static_cast<uint64_t>(box.index_of(i));
    const Words words = philox(Words{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0},
                               static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    const uint64_t first = words.v0 | static_cast<uint64_t>(words.v1) << 32;
    const uint64_t second = words.v2 | static_cast<uint64_t>(words.v3) << 32;
    const double z = sqrt(squared_radius<double>(first)) * turn_of<double>(second);
    round_to(out[i], static_cast<NumberOf<T>>(std * z));
  }
}

}  // namespace

int op_normal_cuda(int dtype, void* out, uint64_t key, int num_dims, const int64_t* box_shape,
                   const int64_t* global_shape, const int64_t* box_offset, double std, void* stream) {
  Box box;
  if (!make_box(num_dims, box_shape, global_shape, box_offset, &box)) return OP_BAD_ARGUMENT;
  if (box.num_elements == 0) return 0;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t blocks = (box.num_elements + kThreads - 1) / kThreads, most = 32 * num_multiprocessors();
    normal_box<T><<<static_cast<unsigned>(blocks < most ? blocks : most), kThreads, 0,
                    static_cast<cudaStream_t>(stream)>>>(static_cast<T*>(out), key, box, std);
    return launch_status();
  });
}
