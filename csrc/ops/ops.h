// C ABI of the trainer's native library: fused operations, and normals by counter; on CPU, and on CUDA if that was
// built.
//
// Tensors are dense and row-major. Every function that can fail returns 0, OP_BAD_ARGUMENT, or a positive cudaError_t.
// CPU functions take the largest number of threads to use; CUDA functions a stream (cudaStream_t) of the current
// device, on which they only enqueue work. On the CPU no result depends on the number of threads or on the instruction
// set.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
#define OP_API extern "C" __attribute__((visibility("default")))
#else
#define OP_API
#endif

enum op_dtype { OP_F64 = 0, OP_F32 = 1, OP_BF16 = 2, OP_I64 = 3, OP_F16 = 4 };  // OP_I64 of rows' experts alone
enum { OP_BAD_ARGUMENT = -1 };
enum op_simd { OP_SIMD_BASE = 0, OP_SIMD_AVX2 = 1, OP_SIMD_AVX512 = 2 };

OP_API const char* op_error_text(int code);
OP_API int op_has_cuda(void);
// The instruction set in use: the widest that this CPU offers, or less after a limit was set (for tests).
OP_API int op_simd(void);
OP_API void op_limit_simd(int simd);

// A norm over rows [num_rows, num_cols], of x, or of the residual stream after x is added to it: sum = x + residual,
// rounded; y = (sum - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((sum - mean)^2) + eps). For OP_RMSNORM the mean
// in y and rstd is 0, and so is the bias (null). Without a residual (null), `sum` is x and not written. `numbers` [num_rows]
// are each row's rstd, for OP_LAYERNORM its mean and rstd; they are double for OP_F64, else float; so is all arithmetic.
// The result of a row does not depend on the other rows. No output may be an input.
enum op_norm { OP_RMSNORM = 0, OP_LAYERNORM = 1 };
OP_API int op_add_norm_forward(int dtype, int norm, const void* x, const void* residual, const void* weight,
                               const void* bias, void* sum, void* y, void* numbers, int64_t num_rows, int64_t num_cols,
                               double eps, int num_threads);
// dx is the gradient of `sum`, so of x and of the residual alike: what comes through y, and dsum, which may be null.
// `dweights` [num_cols] is the gradient of the weight, for OP_LAYERNORM [2, num_cols] those of weight and bias, and has
// the type of `numbers`. `partials` is scratch memory for op_add_norm_partials[_cuda](...) times as much.
OP_API int op_add_norm_backward(int dtype, int norm, const void* dy, const void* dsum, const void* sum,
                                const void* weight, const void* numbers, void* dx, void* dweights, void* partials,
                                int64_t num_rows, int64_t num_cols, int num_threads);
OP_API int64_t op_add_norm_partials(int64_t num_rows);
OP_API int op_add_norm_forward_cuda(int dtype, int norm, const void* x, const void* residual, const void* weight,
                                    const void* bias, void* sum, void* y, void* numbers, int64_t num_rows,
                                    int64_t num_cols, double eps, void* stream);
OP_API int op_add_norm_backward_cuda(int dtype, int norm, const void* dy, const void* dsum, const void* sum,
                                     const void* weight, const void* numbers, void* dx, void* dweights, void* partials,
                                     int64_t num_rows, int64_t num_cols, void* stream);
OP_API int64_t op_add_norm_partials_cuda(int64_t num_rows);

// Rows of packed heads: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size] holds the heads of q, then of k, then
// of v. A head of q or k is normalized if its weight is there (as by RMSNorm), then turned if `turns` is there.
struct op_heads {
  int64_t num_tokens, num_heads, num_kv_heads, head_size;  // head_size is even
  const void* turns;     // [num_tokens, head_size]: cosines of half a head, then sines; double for OP_F64, else float
  const void* q_weight;  // [head_size] of the dtype; both or none
  const void* k_weight;
  double eps;
};
// The gradients of the three, each with strides in elements; neighbouring elements of a head are neighbours in memory.
struct op_head_gradients {
  const void *dq, *dk, *dv;
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
};

// Pairs (i, i + head_size / 2) of q and k turn by the token's angles: out[t] = q heads, then k heads, out_stride
// elements a token; v is not read. `out` may be qkv itself. The result of a token does not depend on the others.
OP_API int op_rope_forward(int dtype, const struct op_heads* heads, const void* qkv, void* out, int64_t out_stride,
                           int num_threads);
// dqkv has the rows of qkv. With weights, qkv is the forward's input and dweights [2, head_size] the gradients of
// q_weight and k_weight, in the type of `turns`; `partials` is scratch for op_rope_partials[_cuda](...) times 2 *
// head_size numbers of that type. Without weights, qkv, dweights and partials are not read.
OP_API int op_rope_backward(int dtype, const struct op_heads* heads, const struct op_head_gradients* gradients,
                            const void* qkv, void* dqkv, void* dweights, void* partials, int num_threads);
OP_API int64_t op_rope_partials(const struct op_heads* heads);
OP_API int op_rope_forward_cuda(int dtype, const struct op_heads* heads, const void* qkv, void* out,
                                int64_t out_stride, void* stream);
OP_API int op_rope_backward_cuda(int dtype, const struct op_heads* heads, const struct op_head_gradients* gradients,
                                 const void* qkv, void* dqkv, void* dweights, void* partials, void* stream);
OP_API int64_t op_rope_partials_cuda(const struct op_heads* heads);

// Rows of logits [num_rows, num_cols] over a part of a vocabulary, row_stride elements apart: column c is token
// first_token + c. Columns from num_true on are padding, which is not read and whose gradient is 0.
struct op_logits {
  void* values;
  int64_t num_rows, num_cols, row_stride, num_true, first_token;
  const int64_t* labels;  // [num_rows]: tokens of the whole vocabulary
};

// sums [3, num_rows], double for OP_F64, else float, as all arithmetic: the largest logit of a row, the sum of
// exp(logit - the largest), and the label's logit, 0 if it is not one of the columns. A row without a finite logit has
// the lowest finite number as its largest, and a sum of 0. The logits stay as they are.
OP_API int op_cross_entropy_forward(int dtype, const struct op_logits* logits, void* sums, int num_threads);
// Overwrites the logits by exp(logit - maximum) * scale, less dloss at the label. `factors` [3, num_rows], of the type of
// sums, holds maximum, scale and dloss of each row; where dloss is 0 the gradient is 0, whatever the row holds.
OP_API int op_cross_entropy_backward(int dtype, const struct op_logits* logits, const void* factors, int num_threads);
OP_API int op_cross_entropy_forward_cuda(int dtype, const struct op_logits* logits, void* sums, void* stream);
OP_API int op_cross_entropy_backward_cuda(int dtype, const struct op_logits* logits, const void* factors, void* stream);

// y [num_rows, num_cols] of packed rows x: SwiGLU, silu(gate) * up, takes rows of num_cols of gate, then as many of up;
// GELU, in its tanh form, rows of num_cols. The result of an element depends on no other.
enum op_activation { OP_SWIGLU = 0, OP_GELU = 1 };
OP_API int op_activation_forward(int dtype, int activation, const void* x, void* y, int64_t num_rows, int64_t num_cols,
                                 int num_threads);
// dx has the rows of x, and y is written again. `dx` may be x itself, `y` dy itself; `y` may be null.
OP_API int op_activation_backward(int dtype, int activation, const void* dy, const void* x, void* dx, void* y,
                                  int64_t num_rows, int64_t num_cols, int num_threads);
OP_API int op_activation_forward_cuda(int dtype, int activation, const void* x, void* y, int64_t num_rows,
                                      int64_t num_cols, void* stream);
OP_API int op_activation_backward_cuda(int dtype, int activation, const void* dy, const void* x, void* dx, void* y,
                                       int64_t num_rows, int64_t num_cols, void* stream);

// Rows by expert: token t has `per_token` rows, t * per_token + k, each for one expert. `rows` [num_rows] takes their
// numbers in the order of `experts` [num_rows], those of one expert in ascending order, and `counts` [num_experts] how
// many each expert has. `partials` is scratch for op_sort_rows_partials[_cuda](num_rows) * num_experts int64. The first
// argument is OP_I64. An expert outside [0, num_experts) is OP_BAD_ARGUMENT on the CPU; on CUDA its row has no place.
OP_API int op_sort_rows(int dtype, const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t* rows,
                        int64_t* counts, int64_t* partials, int num_threads);
OP_API int64_t op_sort_rows_partials(int64_t num_rows);
OP_API int op_sort_rows_cuda(int dtype, const int64_t* experts, int64_t num_rows, int64_t num_experts, int64_t* rows,
                             int64_t* counts, int64_t* partials, void* stream);
OP_API int64_t op_sort_rows_partials_cuda(int64_t num_rows);
// Of the ops of rows that follow, `used` is null, or one int32 where the tensors are: how many of the first rows are
// rows of tokens. What is behind them is neither read nor written.
// out[i] [num_rows, num_cols] is the token of row rows[i]: x[rows[i] / per_token].
OP_API int op_gather_rows(int dtype, const void* x, const int64_t* rows, const int32_t* used, void* out,
                          int64_t num_rows, int64_t num_cols, int64_t per_token, int num_threads);
OP_API int op_gather_rows_cuda(int dtype, const void* x, const int64_t* rows, const int32_t* used, void* out,
                               int64_t num_rows, int64_t num_cols, int64_t per_token, void* stream);
// out[t] [num_tokens, num_cols] is the sum of those of the token's rows t * per_token + k, k = 0, 1, ..., that are among
// `rows` [num_rows], each once: added in this order in the arithmetic of the dtype, to 0, and rounded once. Row rows[i]
// is y[i]. `places` [num_tokens * per_token] is scratch. The bits are the same on CPU and CUDA.
OP_API int op_combine_rows(int dtype, const void* y, const int64_t* rows, const int32_t* used, int64_t* places,
                           void* out, int64_t num_rows, int64_t num_tokens, int64_t num_cols, int64_t per_token,
                           int num_threads);
OP_API int op_combine_rows_cuda(int dtype, const void* y, const int64_t* rows, const int32_t* used, int64_t* places,
                                void* out, int64_t num_rows, int64_t num_tokens, int64_t num_cols, int64_t per_token,
                                void* stream);
// SwiGLU of packed rows as above, times the row's weight; `weights` [num_rows] are double for OP_F64, else float. The
// backward writes the gradients of x and of the weights, and y again. `dx` may be x itself, `y` dy itself. The result of
// a row depends on no other.
OP_API int op_weighted_swiglu_forward(int dtype, const void* x, const void* weights, const int32_t* used, void* y,
                                      int64_t num_rows, int64_t num_cols, int num_threads);
OP_API int op_weighted_swiglu_backward(int dtype, const void* dy, const void* x, const void* weights,
                                       const int32_t* used, void* dx, void* dweights, void* y, int64_t num_rows,
                                       int64_t num_cols, int num_threads);
OP_API int op_weighted_swiglu_forward_cuda(int dtype, const void* x, const void* weights, const int32_t* used, void* y,
                                           int64_t num_rows, int64_t num_cols, void* stream);
OP_API int op_weighted_swiglu_backward_cuda(int dtype, const void* dy, const void* x, const void* weights,
                                            const int32_t* used, void* dx, void* dweights, void* y, int64_t num_rows,
                                            int64_t num_cols, void* stream);

// x [num_rows, num_cols] in fp8, on CUDA alone and not of OP_F64: `values` of x as it is, and `transposed` [num_cols,
// num_rows], either of which may be null. A group of values has one scale: all, those of a row, 128 of a row, or blocks
// of 128 x 128. The largest magnitude m of a group makes it: the smallest power of two that is not below m / limit, or
// that quotient; at least 2^-126, 1 for zeros, NaN if m is not finite. A value is x / scale in float, rounded to the
// nearest of the format and at most its limit, 448 or 57344; a NaN has the code 127. The groups of the transposed copy are
// those of the transposed x. num_cols is a multiple of 16, for tiles and blocks of 128; for a transposed copy so is
// num_rows, for tiles of 128. All tensors are aligned to 16 bytes.
enum op_fp8_format { OP_E4M3 = 0, OP_E5M2 = 1 };
enum op_fp8_scaling { OP_SCALED_BY_TENSOR = 0, OP_SCALED_BY_ROW = 1, OP_SCALED_BY_TILE = 2, OP_SCALED_BY_BLOCK = 3 };
struct op_fp8_copy {
  void* values;         // null if it is not asked for
  const float* maxima;  // [1] by tensor, a number a row of the copy by row, else null
  float* scales;        // [1], [rows], [cols / 128, rows], or [rows / 128, cols / 128], both rounded up, cols to 4 times 128
};
OP_API int op_fp8_cast_cuda(int dtype, int format, int scaling, int is_pow2, const void* x,
                            const struct op_fp8_copy* plain, const struct op_fp8_copy* transposed, int64_t num_rows,
                            int64_t num_cols, void* stream);
// The largest magnitudes of x: [1] by tensor, or by row those of its rows, then of its columns, [num_rows + num_cols].
OP_API int op_fp8_maxima_cuda(int dtype, int scaling, const void* x, float* maxima, int64_t num_rows, int64_t num_cols,
                              void* stream);

// Which elements a dropout drops, and where x [num_samples, num_positions, num_features] is in the global tensor.
// The mask of an element is a function of (seed, step, layer, site) and of its global sample, position and feature.
struct op_mask {
  uint64_t seed, step;
  uint32_t layer, site;
  uint64_t first_sample, first_position, first_feature;
  double probability;  // of being dropped, in [0, 1)
};

// y = x / (1 - probability) if kept, 0 if dropped.
OP_API int op_dropout(int dtype, const void* x, void* y, int64_t num_samples, int64_t num_positions,
                      int64_t num_features, const struct op_mask* mask, int num_threads);
OP_API int op_dropout_cuda(int dtype, const void* x, void* y, int64_t num_samples, int64_t num_positions,
                           int64_t num_features, const struct op_mask* mask, void* stream);

// A part of one parameter that a rank updates: `count` elements of each, all of the dtype, which is OP_F64 or OP_F32; the
// moments of OP_F32 may be OP_BF16, and its master may be split: `master` has the low 16 bits, `published` the rest.
struct op_interval {
  const void* gradient;
  void *exp_avg, *exp_avg_sq, *master;
  void* published;  // takes the rounded master; NULL if the master is itself the weight, and for OP_F64
  int64_t count, decays;
  int64_t row;                     // of the squared norms
  int64_t first_chunk, end_chunk;  // its chunks
};
// The elements [begin, end) of an interval, fewer than 2^31; begin is a multiple of 16. Tables of both are where the op
// runs: in the device's memory for CUDA.
struct op_chunk {
  int64_t interval, begin, end;
};
// One step, after `step` steps.
struct op_adamw_step {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  int64_t moments;   // their dtype
  int64_t is_split;  // whether all masters are
  int64_t published;  // the dtype of what is: OP_BF16, or OP_F16 where no master is split
};

// AdamW in place on the elements of all chunks, with the gradients times `factor`; nothing is written if `is_bad` is
// above 0. Both are read where the op runs. The bits of an element depend on its own numbers and the step alone, and are
// the same on CPU and CUDA.
OP_API int op_adamw(int dtype, const struct op_interval* intervals, const struct op_chunk* chunks, int64_t num_chunks,
                    const struct op_adamw_step* step, const double* factor, const float* is_bad, int num_threads);
OP_API int op_adamw_cuda(int dtype, const struct op_interval* intervals, const struct op_chunk* chunks,
                         int64_t num_chunks, const struct op_adamw_step* step, const double* factor,
                         const float* is_bad, void* stream);
// out[row] = the sum of the squares of each interval's gradient, in double; other rows are left as they are. `partials`
// is scratch for a number a chunk. The bits depend on the values of the interval and its cut into chunks.
OP_API int op_squared_norms(int dtype, const struct op_interval* intervals, int64_t num_intervals,
                            const struct op_chunk* chunks, int64_t num_chunks, double* partials, double* out,
                            int num_threads);
OP_API int op_squared_norms_cuda(int dtype, const struct op_interval* intervals, int64_t num_intervals,
                                 const struct op_chunk* chunks, int64_t num_chunks, double* partials, double* out,
                                 void* stream);

// A range of a matrix that a rank updates by Muon, on CUDA alone: `count` elements of each, of OP_F64 or OP_F32. Moments and
// masters are as an op_interval has them.
struct op_muon_part {
  const void* gradient;
  void *moment, *master, *published;
  int64_t count;
  int64_t sent;      // the element of all directions where its own begin; below 0 they are not wanted
  int64_t returned;  // the element of all updates where its own begin
  double rate, decay, scale;  // factors: of lr, of weight_decay, and of the rate for its matrix
};
// One step.
struct op_muon_step {
  double momentum, lr, weight_decay;
  int64_t moments, is_split, published;  // as op_adamw_step has them
};

// Average the gradients times `factor` into the moments, and write Nesterov's mean of both: in OP_BF16, or in OP_F64 for
// such gradients. A moment stays as it is if `is_bad` is above 0. Roundings are those of torch's lerp on CUDA.
OP_API int op_muon_direction_cuda(int dtype, const struct op_muon_part* parts, const struct op_chunk* chunks,
                                  int64_t num_chunks, const struct op_muon_step* step, const double* factor,
                                  const float* is_bad, void* directions, void* stream);
// Decay the masters and step by updates, which have the dtype of directions; nothing is written if `is_bad` is above 0.
OP_API int op_muon_update_cuda(int dtype, const struct op_muon_part* parts, const struct op_chunk* chunks,
                               int64_t num_chunks, const struct op_muon_step* step, const float* is_bad,
                               const void* updates, void* stream);

// Philox4x32-10 of one counter; `counter` and `random` have four words, `key` two.
OP_API void op_philox(const uint32_t* counter, const uint32_t* key, uint32_t* random);
// Fill the dense box [box_offset, box_offset + box_shape) of a tensor of `global_shape` with std * z, where z is the
// standard normal number of (key, flat global index); computed in double, then rounded (to 16 bits through float). At
// most 8 dims; the bits are the same on all devices.
OP_API int op_normal(int dtype, void* out, uint64_t key, int num_dims, const int64_t* box_shape,
                     const int64_t* global_shape, const int64_t* box_offset, double std, int num_threads);
OP_API int op_normal_cuda(int dtype, void* out, uint64_t key, int num_dims, const int64_t* box_shape,
                          const int64_t* global_shape, const int64_t* box_offset, double std, void* stream);
