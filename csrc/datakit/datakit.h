// C ABI of datakit's native library: manifests, reads, blocks of a cache, the batch gather, packing, and random access into a
// blend's rotation and epochs.
#pragma once

#include <cstdint>

#define DK_API extern "C" __attribute__((visibility("default")))

struct dk_store {  // the addresses at which its shards begin, and that of its end: num_shards + 1, rising
  const int64_t* token_starts;
  int64_t num_shards;
  int64_t bytes_a_token;  // 2: uint16, 4: int32
};

struct dk_span {  // consecutive tokens of a store, in a row of a batch
  int64_t row;
  int64_t store;
  int64_t start;
  int64_t num_tokens;
  int64_t goes_on;  // in a packed row: whether its document has a token after these, the label of the last of them
};

struct dk_piece {  // consecutive tokens of one shard, in a row of a batch
  int64_t row;
  int64_t tokens;  // their address in memory; of dk_cut the byte of the shard's tokens at which they begin
  int64_t num_tokens;
  int64_t bytes_a_token;
  int64_t goes_on;
};

// Cuts spans at the ends of shards and returns the number of pieces, of which the first `most` are written, in the order of
// the spans. With `whole` no span may be cut, nor the token after one that goes on. The shards that are read are put
// into `shards`, sorted and each once, as pairs of a store and a shard of it, and their number into *num_shards; slots[i] is
// the one of them that piece i is in. Both have room for `most`. Returns -1 - i if span i is not in its store, or is cut, and
// the smallest number if memory is short.
DK_API int64_t dk_cut(const dk_store* stores, const dk_span* spans, int64_t num_spans, int whole, int64_t most,
                      dk_piece* pieces, int64_t* slots, int64_t* shards, int64_t* num_shards);

// Makes a batch of num_rows x seq_length from pieces that are sorted by row and, in a row, by place; the pieces of each
// row sum to seq_length + 1 tokens. Outputs are row-major: tokens, labels (the next token), positions (int64), loss_mask.
// eod_ids has one value a row, -1 for none; with mask_eod the loss mask is 0 if a token is its row's end of document,
// with reset_positions the position after such a token is 0. Without labels, null, neither of these nor the others are made,
// and tokens are [num_rows, seq_length + 1]. Returns 0, or -EINVAL before anything is written where the
// pieces break these rules; -ENOMEM; -EFAULT if a piece is of a mapped file that can no longer be read.
DK_API int dk_gather(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t seq_length,
                     const int64_t* eod_ids, int mask_eod, int reset_positions, int64_t* tokens, int64_t* labels,
                     int64_t* positions, float* loss_mask, int num_threads);

// Makes a batch like dk_gather of rows that hold pieces of documents, each of one token or more, and then padding; the
// pieces of a row have seq_length tokens or fewer. Positions begin at 0 with each piece and with the padding. The loss mask
// is 0 at the end of each document, whose next token is of another one, and in the padding. Tokens and labels of the padding,
// and labels at ends, are the row's end of document, 0 if it has none. With mask_eod it is 0 at each such token too.
DK_API int dk_gather_packed(const dk_piece* pieces, int64_t num_pieces, int64_t num_rows, int64_t seq_length,
                            const int64_t* eod_ids, int mask_eod, int64_t* tokens, int64_t* labels, int64_t* positions,
                            float* loss_mask, int num_threads);

// Copies bytes that may be of a mapped file; 0, or -EFAULT if some cannot be read: the file was cut short, or its disk does
// not answer.
DK_API int dk_copy_mapped(const void* source, int64_t num_bytes, void* target);

// The address that could not be read, after -EFAULT of the last call on this thread.
DK_API int64_t dk_unread();

struct dk_shard {  // a shard as a manifest has it: places in its text, counts, and of .bin, .idx and .origin the sizes and
                   // where their 16 digits of XXH3-64 are
  int64_t name_at, name_bytes;
  int64_t num_documents, num_tokens, first_line;
  int64_t size_bytes[3];
  int64_t digest_at[3];
};

// Reads the list of shards that begins at byte `start` of a manifest of num_bytes bytes, if it is laid out as datakit writes
// it, and returns their number, from 1 to `most`; -1 if it is laid out otherwise. `sorted` becomes what is between the
// brackets of the compact JSON of the list with sorted keys, `content` that of [[num_tokens,bin.xxh3_64],...]; both have
// room for num_bytes. `lengths` becomes the bytes of these two, and the place after the list's end.
DK_API int64_t dk_scan_shards(const char* text, int64_t start, int64_t num_bytes, int64_t most, dk_shard* shards,
                              char* sorted, char* content, int64_t* lengths);

// Makes the checks of documents: the low 32 bits of XXH3-64 over a document's origin (offset u64, source u32, line u32) and
// its tokens. These are sizes[i] bytes each, one after the other. Returns 0, -ENOMEM, or -EFAULT as dk_gather does.
DK_API int dk_check_documents(const uint8_t* tokens, const int64_t* sizes, int64_t num_documents, const uint64_t* offsets,
                              const uint32_t* sources, const uint32_t* lines, uint32_t* checks);

// Returns the first shard with a file that has not its size, or num_shards; a negative errno if the folder cannot be opened.
DK_API int64_t dk_find_misfit(const char* folder, const char* text, const dk_shard* shards, int64_t num_shards);

// Asks the kernel for the pages of pieces of mapped shards, all at once, if some that are looked at are not in memory, or pages
// were waited for since the last call, and for some calls after that. Returns whether it did.
DK_API int64_t dk_ask_ahead(const dk_piece* pieces, int64_t num_pieces);

struct dk_read {  // a range of an open file, and where its bytes go
  int64_t descriptor;
  int64_t offset;
  void* target;
  int64_t num_bytes;
};

// Reads ranges of files, on up to num_threads threads. Returns 0, or the negative errno of a read that failed, whose number
// is in *failed: -ENODATA if its file ends before the range does. Other targets may then be unread.
DK_API int64_t dk_read_files(const dk_read* reads, int64_t num_reads, int num_threads, int64_t* failed);

// Of blocks, files of a folder by names that each end with a 0: sets found[i] to whether block i is there with sizes[i]
// bytes. Its time of change becomes now, if that is not recent; one of another size is removed. 0, or a negative errno.
DK_API int64_t dk_find_blocks(const char* folder, const char* names, const int64_t* sizes, int64_t num_blocks,
                              int64_t* found);

// Writes blocks that no reader sees before they are whole, by way of this process's folder in the cache. Its file `room` there,
// which keeps as much room as they take, shrinks on the way. Returns 0, or a negative errno.
DK_API int64_t dk_write_blocks(const char* folder, const char* process, const char* room, const char* names,
                               const void* const* contents, const int64_t* sizes, int64_t num_blocks);

// Removes blocks, those used longest ago first, until all files have at most wanted bytes, or with those that are needed at
// most most. What a process holds has a name in its folder too, is counted and stays. The folders of processes that are over
// are removed; the others are counted. Names that begin with a dot are not blocks'. Returns the bytes left, in whole pages, or
// a negative errno.
DK_API int64_t dk_evict_blocks(const char* folder, const char* needed, int64_t num_needed, int64_t most, int64_t wanted,
                               int64_t* num_processes);

// Locks bytes of an open file for its descriptor, in order. Returns how many before the first that another has locked, or a
// negative errno.
DK_API int64_t dk_lock_bytes(int64_t file, const int64_t* places, int64_t num_places);

// Maps blocks for reading, at addresses[i], and links them into this process's folder: what has a name there is held. Null where
// block i is not there with sizes[i] bytes, or cannot be mapped or linked. Returns 0, or a negative errno.
DK_API int64_t dk_map_blocks(const char* folder, const char* process, const char* names, const int64_t* sizes,
                             int64_t num_blocks, void** addresses);

// Cuts documents that follow each other from token first_token on into pieces of at most seq_length tokens, all but a
// document's last of just so many, and returns their number; empty documents have none. -EINVAL if a length is negative
// or seq_length is not from 1 to 2^24.
DK_API int64_t dk_count_pieces(const int32_t* lengths, int64_t num_documents, int64_t seq_length);

// Puts these pieces into rows of seq_length tokens, by best fit in decreasing order of length, or each into a row of its
// own, and returns the number of rows. The pieces of row r are ends[r - 1] (0 of the first) up to ends[r], in the order of
// their tokens. A piece begins at token starts[i] and has sizes[i] tokens, negated if its document goes on after it. All
// three outputs have dk_count_pieces() elements. The same input has the same rows always. -EINVAL as above, or -ENOMEM.
DK_API int64_t dk_pack(const int32_t* lengths, int64_t num_documents, int64_t first_token, int64_t seq_length,
                       int best_fit, int64_t* ends, int64_t* starts, int32_t* sizes);

// Sample i of a rotation falls at (step * i + theta) mod 2^62, step being 2^62 over the golden ratio. For each point, 0 to
// 2^62, counts how many of samples 0 to num_samples - 1 fall below it; num_samples is at most 2^62. O(log) a point.
DK_API void dk_rotation_counts(int64_t theta, const int64_t* points, int64_t num_points, int64_t num_samples,
                               int64_t* counts);

// Source s owns the points from edges[s] up to edges[s + 1]; edges[0] is 0 and edges[num_sources] 2^62. For each sample,
// from 0 to 2^62 - 1, finds its source and how many of the earlier samples are of that source.
// Returns 0 or -ENOMEM.
DK_API int dk_rotation_locate(int64_t theta, const int64_t* edges, int64_t num_sources, const int64_t* samples,
                              int64_t num_samples, int64_t* sources, int64_t* numbers);

enum { DK_MAX_WINDOW_BLOCKS = 64, DK_WINDOW_PART = 64 };  // of an order in blocks

struct dk_epochs {  // of a source: what the order of its `size` elements, at most 2^62, in an epoch is named by
  const char* before;  // the epoch in decimal digits
  int64_t before_bytes;
  const char* after;
  int64_t after_bytes;
  int64_t size;
  int64_t block_rows;  // at most the size; 0 if elements are not ordered in blocks
};

// Number n of a source is at position n mod size of epoch n div size. Finds the element that is there in the epoch's order: the
// permutation whose key of round r is XXH3-64 of the epoch's name, of at most 240 bytes, with seed r. In blocks of block_rows
// elements, the name with "/blocks" permutes the blocks, which are cut into windows of a DK_WINDOW_PART-th of them, one at least
// and DK_MAX_WINDOW_BLOCKS at most; the name with "/window/" and its number permutes the elements of a window.
DK_API void dk_elements(const dk_epochs* epochs, const int64_t* sources, const int64_t* numbers, int64_t count,
                        int64_t* elements);

// Finds the positions of elements in one epoch of a source: dk_elements inverted.
DK_API void dk_positions(const dk_epochs* source, int64_t epoch, const int64_t* elements, int64_t count,
                         int64_t* positions);

// Shuffles values as numpy.random.RandomState does, from its state on: the 624 words of its Mersenne Twister, and how many
// of them are used up. There are at most 2^32 values. The state goes on.
DK_API void dk_shuffle(uint32_t* state, uint32_t* values, int64_t num_values);

// Notes for each place that `stride` divides how many tokens the documents at the places before have, and after them the
// tokens of all, which it returns. Document d has lengths[d - first] tokens.
DK_API int64_t dk_token_starts(const int32_t* documents, int64_t num_places, const int32_t* lengths, int64_t first,
                               int64_t stride, int64_t* starts);

// The source of each sample: the first whose weights[s] * max(sample, 1) - (its samples so far) is largest, in float64.
// Before each sample that `stride` divides, and after the last, it notes how many samples each source has. At most 65,536
// sources. -ENOMEM if memory is short, -EINVAL before anything is written if a weight is not a finite number.
DK_API int dk_greedy_blend(const double* weights, int64_t num_sources, int64_t num_samples, int64_t stride,
                           uint16_t* sources, int64_t* counts);
