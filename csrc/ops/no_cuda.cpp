// In place of device.cu if the library is built without CUDA.
#include "ops.h"

#ifndef THREEFOLD_HAS_CUDA
int op_has_cuda() { return 0; }

const char* op_error_text(int code) { return code == 0 ? "ok" : "bad argument"; }
#endif
