#include "sums.h"

#include <algorithm>

#include "crc64.h"

namespace ckptkit {
namespace {

// One chunk's box in its tensor, as rows of neighbouring elements of the tensor.
class Rows {
 public:
  Rows(const ck_chunks& chunks, uint64_t number)
      : offset_(chunks.box_offset + number * chunks.num_dims), box_(chunks.box_shape + number * chunks.num_dims),
        shape_(chunks.shape + chunks.tensor[number] * chunks.num_dims), itemsize_(chunks.itemsize[chunks.tensor[number]]) {
    uint64_t dim = chunks.num_dims - 1;
    for (length_ = box_[dim]; dim > 0 && box_[dim] == shape_[dim];) length_ *= box_[--dim];
    dim_ = dim;
    for (stride_ = 1; dim + 1 < chunks.num_dims;) stride_ *= shape_[++dim];
    total_ = stride_;
    for (dim = 0; dim <= dim_; ++dim) total_ *= shape_[dim];
  }

  // What elements [position, position + count) of the box add to the tensor's sum.
  uint64_t sum(const uint8_t* data, uint64_t position, uint64_t count, bool carryless) const {
    uint64_t sum = 0, last = 0, gap = 0, factor = 0;
    uint64_t row = position / length_, within = position % length_;
    for (; count > 0; ++row, within = 0) {
      const uint64_t taken = std::min(length_ - within, count);
      const uint64_t end = begin(row) + within + taken;
      if (sum != 0) {
        if (end - last != gap) factor = crc64_shift((gap = end - last) * itemsize_);
        sum = crc64_multiply(sum, factor, carryless);
      }
      sum ^= crc64(data, taken * itemsize_, carryless);
      last = end, data += taken * itemsize_, count -= taken;
    }
    return crc64_multiply(sum, crc64_shift((total_ - last) * itemsize_), carryless);
  }

 private:
  // The place of a row's first element in the tensor.
  uint64_t begin(uint64_t row) const {
    uint64_t place = offset_[dim_] * stride_, stride = stride_ * shape_[dim_];
    for (uint64_t dim = dim_; dim-- > 0; stride *= shape_[dim]) {
      place += (offset_[dim] + (dim > 0 ? row % box_[dim] : row)) * stride;
      if (dim > 0) row /= box_[dim];
    }
    return place;
  }

  const uint64_t *offset_, *box_, *shape_;
  uint64_t itemsize_;
  uint64_t dim_;     // the outermost dim that a row goes along; those after it are whole
  uint64_t length_;  // elements of a row
  uint64_t stride_;  // elements of the dims after dim_
  uint64_t total_;   // elements of the tensor
};

}  // namespace

void add_sums(const ck_chunks& chunks, const uint8_t* data, uint64_t offset, uint64_t size, bool carryless) {
  const uint64_t *const begin = chunks.begin_bytes, *const end = begin + chunks.num_chunks, stop = offset + size;
  const uint64_t* at = std::upper_bound(begin, end, offset);
  for (at -= at != begin; at < end && *at < stop; ++at) {
    const uint64_t from = std::max(offset, at[0]), until = std::min(stop, at[1]), number = at - begin;
    if (from >= until) continue;
    const uint64_t tensor = chunks.tensor[number], itemsize = chunks.itemsize[tensor];
    const uint64_t position = chunks.start[number] + (from - at[0]) / itemsize;
    const uint64_t sum =
        Rows(chunks, number).sum(data + (from - offset), position, (until - from) / itemsize, carryless);
    __atomic_fetch_xor(chunks.sums + tensor, sum, __ATOMIC_RELAXED);
  }
}

}  // namespace ckptkit

void ck_add_sums(const ck_chunks* chunks, const void* data, uint64_t offset_bytes, uint64_t size_bytes, int carryless) {
  using namespace ckptkit;
  add_sums(*chunks, static_cast<const uint8_t*>(data), offset_bytes, size_bytes,
           carryless < 0 ? has_carryless() : carryless != 0);
}
