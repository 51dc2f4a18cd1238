// Packing: pieces of documents into rows, by best fit in decreasing order of length (arXiv 2404.10830), in O(1) a piece.
//
// A histogram orders the pieces by length. Rows with r tokens to spare are a stack, and a tree of bits over r, 64 ways
// wide, finds the smallest r that is enough: four words at most. Memory is 16 bytes a piece and 12 a token of a row.
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <vector>

#include "../calls.h"
#include "datakit.h"

namespace {

constexpr int64_t kMaxSeqLength = 1 << 24;
constexpr uint32_t kNone = ~uint32_t{0};

// A set of whole numbers below a size, which finds its smallest member from a number on.
class Members {
 public:
  explicit Members(int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size);
    } while (size > 1);
  }

  void add(int64_t number) {
    for (auto& words : levels_) {
      const bool was_empty = words[number / 64] == 0;
      words[number / 64] |= uint64_t{1} << (number % 64);
      if (!was_empty) return;
      number /= 64;
    }
  }

  void remove(int64_t number) {
    for (auto& words : levels_) {
      if ((words[number / 64] &= ~(uint64_t{1} << (number % 64))) != 0) return;
      number /= 64;
    }
  }

  int64_t from(int64_t number) const {  // -1 if there is none
    for (size_t level = 0; level < levels_.size(); ++level) {
      const auto& words = levels_[level];
      if (number / 64 >= static_cast<int64_t>(words.size())) return -1;
      const uint64_t word = words[number / 64] >> (number % 64);
      if (word != 0) {
        number += std::countr_zero(word);
        while (level-- > 0) number = number * 64 + std::countr_zero(levels_[level][number]);
        return number;
      }
      number = number / 64 + 1;
    }
    return -1;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

// Calls use(start, size, goes_on) for each piece, in the order of tokens.
template <typename Use>
void for_pieces(const int32_t* lengths, int64_t num_documents, int64_t start, int64_t seq_length, const Use& use) {
  for (int64_t i = 0; i < num_documents; ++i) {
    int64_t rest = lengths[i];
    for (; rest > seq_length; rest -= seq_length, start += seq_length) use(start, seq_length, true);
    if (rest > 0) use(start, rest, false);
    start += rest;
  }
}

// The row of each piece, in the order of tokens, and how many pieces each row has.
struct Rows {
  std::vector<uint32_t> of_piece;
  std::vector<uint32_t> counts;
};

Rows best_fit_rows(const int32_t* lengths, int64_t num_documents, int64_t num_pieces, int64_t seq_length) {
  std::vector<uint32_t> places(seq_length + 2);  // where the pieces of a length begin, the longest first
  for_pieces(lengths, num_documents, 0, seq_length, [&](int64_t, int64_t size, bool) { ++places[size - 1]; });
  uint32_t before = 0;
  for (int64_t size = seq_length; size >= 1; --size) {
    const uint32_t count = places[size - 1];
    places[size - 1] = before;
    before += count;
  }
  std::vector<uint32_t> ordered(num_pieces);
  uint32_t number = 0;
  for_pieces(lengths, num_documents, 0, seq_length,
             [&](int64_t, int64_t size, bool) { ordered[places[size - 1]++] = number++; });

  Rows rows;
  rows.of_piece.resize(num_pieces);
  std::vector<uint32_t> below;                      // the row under each in its stack
  std::vector<uint32_t> tops(seq_length, kNone);    // of the stack of rows with so many tokens to spare
  Members spares(seq_length);
  const auto push = [&](uint32_t row, int64_t spare) {
    if (spare == 0) return;
    if (tops[spare] == kNone) spares.add(spare);
    below[row] = tops[spare];
    tops[spare] = row;
  };
  uint32_t next = 0;
  for (int64_t size = seq_length; size >= 1; --size) {
    for (; next < places[size - 1]; ++next) {  // by now where the pieces of this length end
      const int64_t spare = size < seq_length ? spares.from(size) : -1;
      uint32_t row;
      if (spare < 0) {
        row = static_cast<uint32_t>(rows.counts.size());
        rows.counts.push_back(0);
        below.push_back(kNone);
      } else {
        row = tops[spare];
        tops[spare] = below[row];
        if (tops[spare] == kNone) spares.remove(spare);
      }
      push(row, (spare < 0 ? seq_length : spare) - size);
      ++rows.counts[row];
      rows.of_piece[ordered[next]] = row;
    }
  }
  return rows;
}

}  // namespace

int64_t dk_count_pieces(const int32_t* lengths, int64_t num_documents, int64_t seq_length) {
  if (seq_length < 1 || seq_length > kMaxSeqLength) return -EINVAL;
  int64_t count = 0;
  for (int64_t i = 0; i < num_documents; ++i) {
    const int64_t length = lengths[i];
    if (length < 0) return -EINVAL;
    count += length <= seq_length ? length > 0 : (length + seq_length - 1) / seq_length;
  }
  return count < kNone ? count : -EINVAL;
}

int64_t dk_pack(const int32_t* lengths, int64_t num_documents, int64_t first_token, int64_t seq_length, int best_fit,
                int64_t* ends, int64_t* starts, int32_t* sizes) {
  const int64_t num_pieces = dk_count_pieces(lengths, num_documents, seq_length);
  if (num_pieces < 0) return num_pieces;
  const auto put = [&](int64_t at, int64_t start, int64_t size, bool goes_on) {
    starts[at] = start;
    sizes[at] = static_cast<int32_t>(goes_on ? -size : size);
  };
  if (!best_fit) {
    int64_t row = 0;
    for_pieces(lengths, num_documents, first_token, seq_length, [&](int64_t start, int64_t size, bool goes_on) {
      put(row, start, size, goes_on);
      ends[row] = row + 1;
      ++row;
    });
    return row;
  }
  return without_throw(int64_t{-ENOMEM}, [&] {
    Rows rows = best_fit_rows(lengths, num_documents, num_pieces, seq_length);
    int64_t end = 0;
    for (size_t row = 0; row < rows.counts.size(); ++row) {
      const uint32_t count = rows.counts[row];
      rows.counts[row] = static_cast<uint32_t>(end);  // where its next piece goes
      ends[row] = end += count;
    }
    int64_t number = 0;
    for_pieces(lengths, num_documents, first_token, seq_length, [&](int64_t start, int64_t size, bool goes_on) {
      put(rows.counts[rows.of_piece[number++]]++, start, size, goes_on);
    });
    return static_cast<int64_t>(rows.counts.size());
  });
}
