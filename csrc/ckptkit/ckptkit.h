// C ABI of ckptkit's native library: checksums, and block I/O over whole granules of a data file.
//
// A granule is 1 MiB of a file, counted from the file's first byte; the last one may be shorter. Every function that can
// fail returns 0 or a negative errno. A handle serves one call at a time; calls on different handles run in parallel.
#pragma once

#include <cstdint>

#define CK_API extern "C" __attribute__((visibility("default")))

struct ck_segment {  // bytes in memory
  const void* data;
  uint64_t size_bytes;
};

struct ck_range {  // bytes [offset, offset + size) of a file, and the memory they go to
  uint64_t offset_bytes;
  uint64_t size_bytes;
  void* target;
};

struct ck_copy {
  const void* source;
  void* target;
  uint64_t size_bytes;
};

// The chunks of a data file in file order, over tensors: numbers of chunks and tensors are N and T, dims are D > 0.
struct ck_chunks {
  uint64_t num_chunks, num_dims;
  const uint64_t* begin_bytes;  // [N + 1] where each begins in the file; at last where the last one ends
  const uint64_t* tensor;       // [N]
  const uint64_t* box_offset;   // [N, D]
  const uint64_t* box_shape;    // [N, D]
  const uint64_t* start;        // [N] position in the box of its first element
  const uint64_t* shape;        // [T, D]
  const uint64_t* itemsize;     // [T] bytes
  uint64_t* sums;               // [T] sums of what was added: what parts add is joined by exclusive or
};

// XXH3-64, seed 0. `simd` is 0 portable, 1 AVX2, 2 AVX-512, or -1 for the widest that this CPU offers.
// If `target` (64-byte aligned) is not null, the data is copied there in the same pass.
CK_API uint64_t ck_xxh3_64(const void* data, uint64_t size_bytes, int simd, void* target);
CK_API int ck_best_simd();
// The checksum of each granule of a buffer that begins at a granule.
CK_API int ck_checksums(const void* data, uint64_t size_bytes, uint64_t* checksums);
CK_API int ck_copy_many(const ck_copy* copies, uint64_t num_copies);
// The address that could not be read, after -EFAULT of the last call on this thread: a mapped file was cut short, or its
// disk does not answer. ck_checksums, ck_copy_many and ck_writer_write return it.
CK_API uint64_t ck_unread();
// Verify, if `checksums` (of these granules) is not null, and hand out bytes [offset, offset + size) of a file, from a
// granule's begin, to ranges that are sorted by offset. Returns the first damaged granule, of which nothing is handed out,
// or the largest number if there is none. If `chunks` is not null, what is handed out is added to their sums: `places` has
// where each range begins, as an offset among the chunks; one past them adds nothing. The largest number but one: no memory.
CK_API uint64_t ck_place(const void* data, uint64_t offset_bytes, uint64_t size_bytes, const ck_range* ranges,
                         uint64_t num_ranges, const uint64_t* checksums, const ck_chunks* chunks, const uint64_t* places);

// Add what bytes [offset, offset + size) of a file hold to the sums of its tensors: the CRC-64/NVME (register from 0, not
// inverted) of each tensor's row-major bytes, once all is added. `carryless` is 0 portable, 1 by carry-less multiplication,
// or -1 for the best that this CPU offers.
CK_API void ck_add_sums(const ck_chunks* chunks, const void* data, uint64_t offset_bytes, uint64_t size_bytes, int carryless);

// Write to a new, empty file, whose descriptor stays the caller's, and reserve its size (so that a full disk shows at once);
// O_DIRECT if `direct` and the file system agree.
CK_API int ck_writer_open(int file, uint64_t size_bytes, int direct, void** writer);
// Have each later write add its bytes to the sums of `chunks`, which stay there until the end.
CK_API void ck_writer_sum(void* writer, const ck_chunks* chunks);
// Write the segments, one after the other, at `offset_bytes` (a granule's begin); they end at a granule's end or the file's.
// `checksums` gets one value for each granule written.
CK_API int ck_writer_write(void* writer, uint64_t offset_bytes, const ck_segment* segments, uint64_t num_segments,
                           uint64_t* checksums, int num_threads);
// With `complete`, write what O_DIRECT could not, so that an fsync makes the file durable; without, it may lack its last
// bytes. The handle is gone whatever the result.
CK_API int ck_writer_end(void* writer, int complete);

// O_DIRECT if `direct` and the file system agree; granules that the page cache has are then taken from it if `from_cache`.
// With `again` a granule that is not right is read once more, past the page cache, before it counts as damaged.
CK_API int ck_reader_open(const char* path, int direct, int from_cache, int again, uint64_t* size_bytes, void** reader);
// How many granules were right at such a second look.
CK_API uint64_t ck_reader_num_differed(void* reader);
// Fill the targets of `ranges`, which are sorted by offset and end within `size_bytes`, the file's expected size. Whole
// granules are read and, if `checksums` is not null, verified before any byte of them is handed out: -EBADMSG puts the
// first damaged granule found into `bad_granule`. If the last granule goes on behind the ranges it is kept for the next
// call. `read_bytes` is increased by what was read from the file. `chunks` and `places` are those of ck_place. -ENODATA: the
// file is shorter than `size_bytes`. Several threads may call this at once.
CK_API int ck_reader_read(void* reader, uint64_t size_bytes, const ck_range* ranges, uint64_t num_ranges,
                          const uint64_t* checksums, const ck_chunks* chunks, const uint64_t* places, int num_threads,
                          uint64_t* bad_granule, uint64_t* read_bytes);
CK_API void ck_reader_close(void* reader);
