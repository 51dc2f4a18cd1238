// The CPU loops that exist once for each instruction set, as a table of functions.
#pragma once

#include <stdint.h>

#include "adamw.h"
#include "dropout_mask.h"

struct Kernels {
  // Elements [begin, end) of an interval of doubles or floats.
  void (*adamw)(int dtype, const op_interval& interval, int64_t begin, int64_t end, const AdamwNumbers& numbers,
                double factor);
  double (*sum_of_squares)(int dtype, const void* values, int64_t count);
  void (*norm_forward)(int dtype, int norm, const void* x, const void* residual, const void* weight, const void* bias,
                       void* sum, void* y, void* numbers, int64_t num_rows, int64_t num_cols, double eps);
  // Adds the gradients of these rows to `dweights`, which have the type of the numbers.
  void (*norm_backward)(int dtype, int norm, const void* dy, const void* dsum, const void* x, const void* weight,
                        const void* numbers, void* dx, void* dweights, int64_t num_rows, int64_t num_cols);
  // Tokens [begin, end); the backward adds the gradients of the weights to `dweights` [2, head_size].
  void (*rope_forward)(int dtype, const op_heads& heads, const void* qkv, void* out, int64_t out_stride, int64_t begin,
                       int64_t end);
  void (*rope_backward)(int dtype, const op_heads& heads, const op_head_gradients& gradients, const void* qkv,
                        void* dqkv, void* dweights, int64_t begin, int64_t end);
  // `y` of the backward may be null; it may be dy, and dx may be x.
  void (*activation_forward)(int dtype, int activation, const void* x, void* y, int64_t num_rows, int64_t num_cols);
  void (*activation_backward)(int dtype, int activation, const void* dy, const void* x, void* dx, void* y,
                              int64_t num_rows, int64_t num_cols);
  // As the functions of ops.h, of all rows, and of tokens [begin, end).
  void (*weighted_swiglu_forward)(int dtype, const void* x, const void* weights, void* y, int64_t num_rows,
                                  int64_t num_cols);
  void (*weighted_swiglu_backward)(int dtype, const void* dy, const void* x, const void* weights, void* dx,
                                   void* dweights, void* y, int64_t num_rows, int64_t num_cols);
  void (*combine_rows)(int dtype, const void* y, const int64_t* places, void* out, int64_t begin, int64_t end,
                       int64_t num_cols, int64_t per_token);
  // Rows [begin, end).
  void (*cross_entropy_forward)(int dtype, const op_logits& logits, void* sums, int64_t begin, int64_t end);
  void (*cross_entropy_backward)(int dtype, const op_logits& logits, const void* factors, int64_t begin, int64_t end);
  // One row: the features [first_feature, first_feature + num_features) of one global sample and position.
  void (*dropout_row)(int dtype, const void* x, void* y, const MaskKey& key, uint64_t sample, uint32_t position,
                      uint64_t first_feature, int64_t num_features);
  // Elements with consecutive flat global indices.
  void (*normal_run)(int dtype, void* out, uint64_t key, uint64_t first_index, int64_t count, double std);
};

extern const Kernels kernels_base, kernels_avx2, kernels_avx512;

const Kernels& kernels();  // the table of op_simd()

inline int64_t item_bytes(int dtype) { return dtype == OP_F64 ? 8 : dtype == OP_F32 ? 4 : 2; }
inline int64_t number_bytes(int dtype) { return dtype == OP_F64 ? 8 : 4; }  // of what it is computed in
inline bool is_dtype(int dtype) { return (dtype >= OP_F64 && dtype <= OP_BF16) || dtype == OP_F16; }
inline const void* at(const void* pointer, int64_t bytes) { return static_cast<const char*>(pointer) + bytes; }
inline void* at(void* pointer, int64_t bytes) { return static_cast<char*>(pointer) + bytes; }
