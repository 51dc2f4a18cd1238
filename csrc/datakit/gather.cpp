// The batch gather: every source token is read once and widened into the tokens and, one place earlier, the labels.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "datakit.h"

namespace {

struct Batch {
  int64_t seq_length;
  const int64_t* eod_ids;
  bool mask_eod;
  bool reset_positions;
  int64_t* tokens;
  int64_t* labels;
  int64_t* positions;
  float* loss_mask;
};

template <typename Token>
void widen(const void* source, int64_t num_tokens, int64_t* target) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  for (int64_t i = 0; i < num_tokens; ++i) {
    Token token;
    std::memcpy(&token, bytes + i * sizeof(Token), sizeof(Token));  // a shard promises no alignment
    target[i] = token;
  }
}

void gather_row(const Batch& batch, int64_t row, const dk_piece* begin, const dk_piece* end) {
  const int64_t length = batch.seq_length;
  int64_t* const tokens = batch.tokens + row * length;
  int64_t* const labels = batch.labels + row * length;
  // The row's first `length` tokens go to `tokens`; its last one is only a label.
  int64_t column = 0;
  int64_t final_token = 0;
  for (const dk_piece* piece = begin; piece != end; ++piece) {
    const int64_t inside = std::min(piece->num_tokens, length - column);
    const auto* const rest = static_cast<const uint8_t*>(piece->tokens) + inside * piece->bytes_a_token;
    const auto copy = piece->bytes_a_token == 2 ? widen<uint16_t> : widen<int32_t>;
    copy(piece->tokens, inside, tokens + column);
    if (inside < piece->num_tokens) copy(rest, 1, &final_token);
    column += piece->num_tokens;
  }
  std::copy(tokens + 1, tokens + length, labels);
  labels[length - 1] = final_token;

  int64_t* const positions = batch.positions + row * length;
  float* const loss_mask = batch.loss_mask + row * length;
  const int64_t eod = batch.eod_ids[row];  // no token is negative, so -1 matches none
  for (int64_t i = 0; i < length; ++i) loss_mask[i] = batch.mask_eod && tokens[i] == eod ? 0.0f : 1.0f;
  int64_t position = 0;
  for (int64_t i = 0; i < length; ++i) {
    positions[i] = position++;
    if (batch.reset_positions && tokens[i] == eod) position = 0;
  }
}

}  // namespace

int dk_gather(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t seq_length, const int64_t* eod_ids,
              int mask_eod, int reset_positions, int64_t* tokens, int64_t* labels, int64_t* positions,
              float* loss_mask, int num_threads) {
  if (num_rows < 0 || seq_length < 1) return -EINVAL;
  std::vector<const dk_piece*> starts{pieces};
  const dk_piece* const end = pieces + num_pieces;
  const dk_piece* piece = pieces;
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t missing = seq_length + 1;
    for (; piece != end && piece->row == row; ++piece) {
      const bool known = piece->bytes_a_token == 2 || piece->bytes_a_token == 4;
      if (!known || piece->num_tokens < 0 || piece->num_tokens > missing) return -EINVAL;
      missing -= piece->num_tokens;
    }
    if (missing != 0) return -EINVAL;
    starts.push_back(piece);
  }
  if (piece != end) return -EINVAL;

  const Batch batch{seq_length, eod_ids, mask_eod != 0, reset_positions != 0, tokens, labels, positions, loss_mask};
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t row; (row = next++) < num_rows;) gather_row(batch, row, starts[row], starts[row + 1]);
  };
  std::vector<std::thread> helpers;
  for (int64_t i = 1; i < std::min<int64_t>(num_threads, num_rows); ++i) {
    try {
      helpers.emplace_back(work);
    } catch (const std::system_error&) {
      break;  // no more threads to be had: those that run do all rows
    }
  }
  work();
  for (auto& helper : helpers) helper.join();
  return 0;
}
