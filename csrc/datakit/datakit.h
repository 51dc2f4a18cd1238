// C ABI of datakit's native library: the batch gather.
#pragma once

#include <cstdint>

#define DK_API extern "C" __attribute__((visibility("default")))

struct dk_piece {  // consecutive tokens of one row, in a mapped shard
  int64_t row;
  const void* tokens;
  int64_t num_tokens;
  int64_t bytes_a_token;  // 2: uint16, 4: int32
};

// Makes a batch of num_rows x seq_length from pieces that are sorted by row and, in a row, by place; the pieces of each
// row sum to seq_length + 1 tokens. Outputs are row-major: tokens, labels (the next token), positions (int64), loss_mask.
// eod_ids has one value a row, -1 for none; with mask_eod the loss mask is 0 where a token is its row's end of document,
// with reset_positions the position after such a token is 0. Returns 0, or -EINVAL before anything is written where the
// pieces break these rules.
DK_API int dk_gather(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t seq_length,
                     const int64_t* eod_ids, int mask_eod, int reset_positions, int64_t* tokens, int64_t* labels,
                     int64_t* positions, float* loss_mask, int num_threads);
