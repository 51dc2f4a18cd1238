// The order of a source's elements in an epoch: a keyed permutation, of the elements or of blocks of them.
#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>

#include "../hashing/xxh3.h"
#include "datakit.h"

namespace {

// What a permutation is named by, of at most 240 bytes.
class Name {
 public:
  Name(const dk_epochs& source, int64_t epoch) {
    append(source.before, source.before_bytes);
    append(epoch);
    append(source.after, source.after_bytes);
  }

  Name with(const char* text) const {
    Name name = *this;
    name.append(text, static_cast<int64_t>(std::strlen(text)));
    return name;
  }

  Name with(const char* text, int64_t number) const {
    Name name = with(text);
    name.append(number);
    return name;
  }

  uint64_t key(int round) const { return hashing::xxh3_64_short(text_, size_, round); }

 private:
  void append(const char* text, int64_t num_bytes) {
    std::copy_n(text, num_bytes, text_ + size_);
    size_ += num_bytes;
  }
  void append(int64_t number) { size_ = std::to_chars(text_ + size_, std::end(text_), number).ptr - text_; }

  char text_[240];
  size_t size_ = 0;
};

// One order of 0 to size - 1: a Feistel network over the bits that hold the size - 1, two at least, is walked along its
// cycle until it lands below the size. Luby and Rackoff 1988; Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
class Permutation {
 public:
  Permutation(const Name& name, uint64_t size) : size_(size) {
    for (int round = 0; round < kNumRounds; ++round) keys_[round] = name.key(round);
    const int num_bits = std::max(2, static_cast<int>(std::bit_width(size - 1)));
    widths_ = {num_bits / 2, num_bits - num_bits / 2};
  }

  uint64_t element_at(uint64_t position) const {
    do {
      position = encrypt(position);
    } while (position >= size_);
    return position;
  }

  uint64_t position_of(uint64_t element) const {
    do {
      element = decrypt(element);
    } while (element >= size_);
    return element;
  }

 private:
  static constexpr int kNumRounds = 8;  // even: the halves end with the widths that they began with

  // The finalizer of SplitMix64 (Steele et al. 2014): every input bit moves every output bit.
  static uint64_t mix(uint64_t word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
  }

  static uint64_t mask(int num_bits) { return (uint64_t{1} << num_bits) - 1; }

  // What a round changes a half by, which has as many bits as the left one in even rounds, and the right one in odd ones.
  uint64_t change(int round, uint64_t other) const { return mix(other ^ keys_[round]) & mask(widths_[round % 2]); }

  uint64_t encrypt(uint64_t value) const {
    uint64_t left = value >> widths_[1];
    uint64_t right = value & mask(widths_[1]);
    for (int round = 0; round < kNumRounds; ++round) left = std::exchange(right, left ^ change(round, right));
    return left << widths_[1] | right;
  }

  uint64_t decrypt(uint64_t value) const {
    uint64_t left = value >> widths_[1];
    uint64_t right = value & mask(widths_[1]);
    for (int round = kNumRounds - 1; round >= 0; --round) right = std::exchange(left, right ^ change(round, left));
    return left << widths_[1] | right;
  }

  std::array<uint64_t, kNumRounds> keys_;
  std::array<int, 2> widths_;  // of the left half and the right one
  uint64_t size_;
};

// One order of 0 to size - 1 that keeps near each other what is near. Blocks are ordered by one permutation, and cut
// into windows of num_blocks_; another one orders the rows of each window. The last block lacks `missing_` rows, and so
// does the window that it comes in.
class BlockOrder {
 public:
  BlockOrder(const Name& name, uint64_t size, uint64_t block_rows)
      : name_(name),
        block_rows_(block_rows),
        count_((size + block_rows - 1) / block_rows),
        num_blocks_(std::clamp<uint64_t>(count_ / DK_WINDOW_PART, 1, DK_MAX_WINDOW_BLOCKS)),
        width_(num_blocks_ * block_rows),
        missing_(count_ * block_rows - size),
        blocks_(name.with("/blocks"), count_),
        short_(blocks_.position_of(count_ - 1)),
        short_window_(short_ / num_blocks_),
        short_end_((short_ % num_blocks_ + 1) * block_rows - missing_) {}

  uint64_t element_at(uint64_t position) {
    const bool is_after = position >= (short_window_ + 1) * width_ - missing_;
    const uint64_t window = (position + (is_after ? missing_ : 0)) / width_;
    uint64_t place = rows_of(window).element_at(position - first_of(window));
    if (window == short_window_ && place >= short_end_) place += missing_;
    return blocks_.element_at(window * num_blocks_ + place / block_rows_) * block_rows_ + place % block_rows_;
  }

  uint64_t position_of(uint64_t element) {
    const uint64_t at = blocks_.position_of(element / block_rows_), window = at / num_blocks_;
    uint64_t place = at % num_blocks_ * block_rows_ + element % block_rows_;
    if (window == short_window_ && at > short_) place -= missing_;
    return first_of(window) + rows_of(window).position_of(place);
  }

 private:
  uint64_t first_of(uint64_t window) const { return window * width_ - (window > short_window_ ? missing_ : 0); }

  // The order of a window's rows; the latest one is kept.
  const Permutation& rows_of(uint64_t window) {
    if (!rows_ || window != window_) {
      const uint64_t stop = std::min((window + 1) * width_, count_ * block_rows_);
      const uint64_t size = stop - (window >= short_window_ ? missing_ : 0) - first_of(window);
      rows_.emplace(name_.with("/window/", static_cast<int64_t>(window)), size);
      window_ = window;
    }
    return *rows_;
  }

  const Name name_;
  const uint64_t block_rows_, count_, num_blocks_, width_, missing_;
  const Permutation blocks_;
  const uint64_t short_;         // where the last block comes,
  const uint64_t short_window_;  // the window that is in,
  const uint64_t short_end_;     // and the rows of that window up to its end
  std::optional<Permutation> rows_;
  uint64_t window_ = 0;
};

}  // namespace

void dk_elements(const dk_epochs* epochs, const int64_t* sources, const int64_t* numbers, int64_t count,
                 int64_t* elements) {
  std::optional<BlockOrder> order;  // the latest one
  int64_t its_source = -1, its_epoch = -1;
  for (int64_t i = 0; i < count; ++i) {
    const dk_epochs& source = epochs[sources[i]];
    const int64_t epoch = numbers[i] / source.size, position = numbers[i] % source.size;
    if (source.block_rows == 0) {
      elements[i] = static_cast<int64_t>(Permutation(Name(source, epoch), source.size).element_at(position));
      continue;
    }
    if (sources[i] != its_source || epoch != its_epoch) {
      order.emplace(Name(source, epoch), source.size, source.block_rows);
      its_source = sources[i];
      its_epoch = epoch;
    }
    elements[i] = static_cast<int64_t>(order->element_at(position));
  }
}

void dk_positions(const dk_epochs* source, int64_t epoch, const int64_t* elements, int64_t count, int64_t* positions) {
  const Name name(*source, epoch);
  const auto find = [&](auto order) {
    for (int64_t i = 0; i < count; ++i) positions[i] = static_cast<int64_t>(order.position_of(elements[i]));
  };
  if (source->block_rows == 0) {
    find(Permutation(name, source->size));
  } else {
    find(BlockOrder(name, source->size, source->block_rows));
  }
}
