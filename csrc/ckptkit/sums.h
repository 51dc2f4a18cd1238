// Sums of tensors' elements: the CRC-64 of a tensor's row-major bytes, out of parts of any shape in any order.
#pragma once

#include <cstdint>

#include "ckptkit.h"

namespace ckptkit {

// Adds bytes of chunks to the sums of their tensors, at the latest when it ends. Bytes that go on in a tensor, behind what
// was added before, cost least. Of each thread its own; several may add to the same sums.
class Summer {
 public:
  Summer(const ck_chunks& chunks, bool carryless) : chunks_(chunks), carryless_(carryless) {}
  ~Summer() { flush(); }
  Summer(const Summer&) = delete;
  Summer& operator=(const Summer&) = delete;

  // Adds bytes [offset, offset + size) of the chunks' file; those outside of all chunks add nothing.
  void add(const uint8_t* data, uint64_t offset, uint64_t size);

 private:
  void enter(uint64_t chunk);
  void add_row(const uint8_t* data, uint64_t begin, uint64_t size);
  uint64_t row_begin(uint64_t row) const;
  void flush();

  const ck_chunks& chunks_;
  bool carryless_;
  uint64_t chunk_ = ~uint64_t{0};  // the one that what follows describes
  // A row is bytes of the chunk's box that are neighbours in the tensor, too.
  uint64_t dim_ = 0;     // the outermost dim that a row goes along; those after it are whole
  uint64_t length_ = 0;  // bytes of a row
  uint64_t stride_ = 0;  // bytes of an index of dim_
  // What is still to be added to the sum of a tensor: the sum of its bytes up to `last_`.
  uint64_t tensor_ = 0, total_ = 0, sum_ = 0, last_ = 0;
  uint64_t gap_ = 0, factor_ = 0;  // from a row's end to the last one's, and what it multiplies by
};

}  // namespace ckptkit
