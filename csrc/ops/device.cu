// What the CUDA half of the library says of itself and of its errors.
#include "device.cuh"

int op_has_cuda() { return 1; }

const char* op_error_text(int code) {
  if (code == 0) return "ok";
  return code < 0 ? "bad argument" : cudaGetErrorString(static_cast<cudaError_t>(code));
}

int num_multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}
