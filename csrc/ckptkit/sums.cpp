#include "sums.h"

#include <algorithm>

#include "crc64.h"

namespace ckptkit {

void Summer::add(const uint8_t* data, uint64_t offset, uint64_t size) {
  const uint64_t *const begin = chunks_.begin_bytes, *const end = begin + chunks_.num_chunks, stop = offset + size;
  const uint64_t* at = begin + chunk_;
  if (chunk_ >= chunks_.num_chunks || offset < at[0] || offset >= at[1]) {
    at = std::upper_bound(begin, end, offset);
    at -= at != begin;
  }
  for (; at < end && *at < stop; ++at) {
    const uint64_t from = std::max(offset, at[0]), until = std::min(stop, at[1]), number = at - begin;
    if (from >= until) continue;
    if (number != chunk_) enter(number);
    const uint64_t position = chunks_.start[number] * chunks_.itemsize[chunks_.tensor[number]] + (from - at[0]);
    const uint8_t* from_data = data + (from - offset);
    uint64_t row = position / length_, within = position % length_;
    for (uint64_t left = until - from; left > 0; ++row, within = 0) {
      const uint64_t taken = std::min(length_ - within, left);
      add_row(from_data, row_begin(row) + within, taken);
      from_data += taken, left -= taken;
    }
  }
}

void Summer::enter(uint64_t chunk) {
  const uint64_t num_dims = chunks_.num_dims, tensor = chunks_.tensor[chunk], itemsize = chunks_.itemsize[tensor];
  const uint64_t *const box = chunks_.box_shape + chunk * num_dims, *const shape = chunks_.shape + tensor * num_dims;
  uint64_t dim = num_dims - 1;
  for (length_ = itemsize * box[dim]; dim > 0 && box[dim] == shape[dim];) length_ *= box[--dim];
  dim_ = dim;
  for (stride_ = itemsize; dim + 1 < num_dims;) stride_ *= shape[++dim];
  if (tensor != tensor_) flush();
  chunk_ = chunk, tensor_ = tensor;
  total_ = stride_;
  for (dim = 0; dim <= dim_; ++dim) total_ *= shape[dim];
}

void Summer::add_row(const uint8_t* data, uint64_t begin, uint64_t size) {
  const uint64_t end = begin + size;
  if (begin < last_) flush();
  if (sum_ != 0) {
    if (end - last_ != gap_) factor_ = crc64_shift(gap_ = end - last_);
    sum_ = crc64_multiply(sum_, factor_, carryless_);
  }
  sum_ ^= crc64(data, size, carryless_);
  last_ = end;
}

// The place of a row's first byte in the tensor.
uint64_t Summer::row_begin(uint64_t row) const {
  const uint64_t *const offset = chunks_.box_offset + chunk_ * chunks_.num_dims,
                 *const box = chunks_.box_shape + chunk_ * chunks_.num_dims,
                 *const shape = chunks_.shape + tensor_ * chunks_.num_dims;
  uint64_t place = offset[dim_] * stride_, stride = stride_ * shape[dim_];
  for (uint64_t dim = dim_; dim-- > 0; stride *= shape[dim]) {
    place += (offset[dim] + (dim > 0 ? row % box[dim] : row)) * stride;
    if (dim > 0) row /= box[dim];
  }
  return place;
}

void Summer::flush() {
  if (sum_ != 0) {
    const uint64_t sum = crc64_multiply(sum_, crc64_shift(total_ - last_), carryless_);
    __atomic_fetch_xor(chunks_.sums + tensor_, sum, __ATOMIC_RELAXED);
  }
  sum_ = last_ = 0;
}

}  // namespace ckptkit

void ck_add_sums(const ck_chunks* chunks, const void* data, uint64_t offset_bytes, uint64_t size_bytes, int carryless) {
  using namespace ckptkit;
  Summer(*chunks, carryless < 0 ? has_carryless() : carryless != 0)
      .add(static_cast<const uint8_t*>(data), offset_bytes, size_bytes);
}
