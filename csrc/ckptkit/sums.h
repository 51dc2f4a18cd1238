// Sums of tensors' elements: the CRC-64 of a tensor's row-major bytes, out of parts of any shape in any order.
#pragma once

#include <cstdint>

#include "ckptkit.h"

namespace ckptkit {

// Adds what bytes [offset, offset + size) of a file hold to the sums of their tensors; no element is cut. Several threads
// may add to the same sums.
void add_sums(const ck_chunks& chunks, const uint8_t* data, uint64_t offset, uint64_t size, bool carryless);

}  // namespace ckptkit
