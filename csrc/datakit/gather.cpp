// The batch gather: every source token is read once and widened into the tokens and, one place earlier, the labels.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <vector>

#include "../calls.h"
#include "../mapped/mapped.h"
#include "datakit.h"
#include "threads.h"
#include "widen.h"

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

// Turns tokens into int64.
void widen(const dk_piece& piece, int64_t first, int64_t num_tokens, int64_t* target) {
  const auto* const source = reinterpret_cast<const uint8_t*>(piece.tokens) + first * piece.bytes_a_token;
  widen_for(hashing::best_simd())(source, piece.bytes_a_token, num_tokens, target);
}

// Copies the tokens of a row, its last label among them, to the place that they have in a batch of tokens alone.
void gather_tokens(const Batch& batch, int64_t row, const dk_piece* begin, const dk_piece* end) {
  int64_t* target = batch.tokens + row * (batch.seq_length + 1);
  for (const dk_piece* piece = begin; piece != end; target += piece->num_tokens, ++piece) {
    widen(*piece, 0, piece->num_tokens, target);
  }
}

void gather_row(const Batch& batch, int64_t row, const dk_piece* begin, const dk_piece* end) {
  if (!batch.labels) return gather_tokens(batch, row, begin, end);
  const int64_t length = batch.seq_length;
  int64_t* const tokens = batch.tokens + row * length;
  int64_t* const labels = batch.labels + row * length;
  // The row's first `length` tokens go to `tokens`; its last one is only a label.
  int64_t column = 0;
  int64_t final_token = 0;
  for (const dk_piece* piece = begin; piece != end; ++piece) {
    const int64_t inside = std::min(piece->num_tokens, length - column);
    widen(*piece, 0, inside, tokens + column);
    if (inside < piece->num_tokens) widen(*piece, inside, 1, &final_token);
    column += piece->num_tokens;
  }
  std::copy(tokens + 1, tokens + length, labels);
  labels[length - 1] = final_token;

  int64_t* const positions = batch.positions + row * length;
  float* const loss_mask = batch.loss_mask + row * length;
  const int64_t eod = batch.eod_ids[row];  // no token is negative, so -1 matches none
  // Loops without a choice inside are what compilers make vectors of.
  std::fill(loss_mask, loss_mask + length, 1.0f);
  for (int64_t i = 0; batch.mask_eod && i < length; ++i) loss_mask[i] = tokens[i] == eod ? 0.0f : 1.0f;
  std::iota(positions, positions + length, 0);
  for (int64_t i = 1, begin = 0; batch.reset_positions && i < length; ++i) {
    if (tokens[i - 1] == eod) begin = i;
    positions[i] -= begin;
  }
}

void fill_packed_row(const Batch& batch, int64_t row, const dk_piece* begin, const dk_piece* end) {
  const int64_t length = batch.seq_length;
  int64_t* const tokens = batch.tokens + row * length;
  int64_t* const labels = batch.labels + row * length;
  int64_t* const positions = batch.positions + row * length;
  float* const loss_mask = batch.loss_mask + row * length;
  const int64_t eod = batch.eod_ids[row];
  const int64_t filler = std::max<int64_t>(eod, 0);
  int64_t column = 0;
  for (const dk_piece* piece = begin; piece != end; ++piece) {
    const int64_t count = piece->num_tokens;
    const int64_t num_labels = count - (piece->goes_on ? 0 : 1);
    widen(*piece, 0, count, tokens + column);
    widen(*piece, 1, num_labels, labels + column);
    for (int64_t i = 0; i < count; ++i) {
      positions[column + i] = i;
      loss_mask[column + i] = batch.mask_eod && tokens[column + i] == eod ? 0.0f : 1.0f;
    }
    column += count;
    if (!piece->goes_on) {
      labels[column - 1] = filler;
      loss_mask[column - 1] = 0.0f;
    }
  }
  for (int64_t i = column; i < length; ++i) {
    tokens[i] = labels[i] = filler;
    positions[i] = i - column;
    loss_mask[i] = 0.0f;
  }
}

// Finds where the pieces of each row begin; false if they break a rule. A row has `most` tokens, or fewer if allowed.
bool find_rows(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t most, bool may_be_short,
               int64_t least, std::vector<const dk_piece*>& starts) {
  starts.push_back(pieces);
  const dk_piece* const end = pieces + num_pieces;
  const dk_piece* piece = pieces;
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t missing = most;
    for (; piece != end && piece->row == row; ++piece) {
      const bool known = piece->bytes_a_token == 2 || piece->bytes_a_token == 4;
      if (!known || piece->num_tokens < least || piece->num_tokens > missing) return false;
      missing -= piece->num_tokens;
    }
    if (missing != 0 && !may_be_short) return false;
    starts.push_back(piece);
  }
  return piece == end;
}

// Calls make(row) for each row, whose pieces may be of mapped files; 0, or -EFAULT if some of them cannot be read.
template <typename Make>
int make_rows(int64_t num_rows, int num_threads, const Make& make) {
  std::atomic<const void*> failed{nullptr};
  for_each_number(num_rows, num_threads, [&](int64_t row) {
    if (failed.load(std::memory_order_relaxed) != nullptr) return;
    if (const void* const address = mapped::read([&] { make(row); })) failed = address;
  });
  return failed.load() == nullptr ? 0 : mapped::unread(failed);
}

}  // namespace

int dk_gather(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t seq_length, const int64_t* eod_ids,
              int mask_eod, int reset_positions, int64_t* tokens, int64_t* labels, int64_t* positions,
              float* loss_mask, int num_threads) {
  return without_throw(-ENOMEM, [&] {
    std::vector<const dk_piece*> starts;
    if (num_rows < 0 || seq_length < 1 || !find_rows(pieces, num_pieces, num_rows, seq_length + 1, false, 0, starts)) {
      return -EINVAL;
    }
    const Batch batch{seq_length, eod_ids, mask_eod != 0, reset_positions != 0, tokens, labels, positions, loss_mask};
    return make_rows(num_rows, num_threads, [&](int64_t row) { gather_row(batch, row, starts[row], starts[row + 1]); });
  });
}

int dk_gather_packed(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t seq_length,
                     const int64_t* eod_ids, int mask_eod, int64_t* tokens, int64_t* labels, int64_t* positions,
                     float* loss_mask, int num_threads) {
  return without_throw(-ENOMEM, [&] {
    std::vector<const dk_piece*> starts;
    if (num_rows < 0 || seq_length < 1 || !find_rows(pieces, num_pieces, num_rows, seq_length, true, 1, starts)) {
      return -EINVAL;
    }
    const Batch batch{seq_length, eod_ids, mask_eod != 0, true, tokens, labels, positions, loss_mask};
    const auto make = [&](int64_t row) { fill_packed_row(batch, row, starts[row], starts[row + 1]); };
    return make_rows(num_rows, num_threads, make);
  });
}

int dk_copy_mapped(const void* source, int64_t num_bytes, void* target) {
  const void* const address = mapped::read([&] { std::memcpy(target, source, num_bytes); });
  return address == nullptr ? 0 : mapped::unread(address);
}

int64_t dk_unread() { return reinterpret_cast<int64_t>(mapped::last_unread()); }
