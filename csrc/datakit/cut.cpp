// Spans of stores into pieces of shards.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "../calls.h"
#include "datakit.h"

static int64_t cut(const dk_store* stores, const dk_span* spans, int64_t num_spans, int whole, int64_t most,
                   dk_piece* pieces, int64_t* slots, int64_t* shards, int64_t* num_shards) {
  std::vector<std::pair<int64_t, int64_t>> read;  // the store and the shard of each piece
  read.reserve(most);
  int64_t num_pieces = 0;
  for (int64_t i = 0; i < num_spans; ++i) {
    const dk_span& span = spans[i];
    const dk_store& store = stores[span.store];
    const int64_t* const ends = store.token_starts + 1;
    const int64_t stop = span.start + span.num_tokens;
    if (span.start < 0 || span.num_tokens < 0 || stop + span.goes_on > ends[store.num_shards - 1]) return -1 - i;
    for (int64_t begin = span.start; begin < stop;) {
      const int64_t shard = std::upper_bound(ends, ends + store.num_shards, begin) - ends;
      const int64_t end = std::min(stop, ends[shard]);
      if (whole && stop + span.goes_on > ends[shard]) return -1 - i;
      if (num_pieces < most) {
        const int64_t first_byte = (begin - store.token_starts[shard]) * store.bytes_a_token;
        pieces[num_pieces] = {span.row, first_byte, end - begin, store.bytes_a_token, span.goes_on};
        read.emplace_back(span.store, shard);
      }
      ++num_pieces;
      begin = end;
    }
  }
  auto sorted = read;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  for (size_t i = 0; i < read.size(); ++i) {
    slots[i] = std::lower_bound(sorted.begin(), sorted.end(), read[i]) - sorted.begin();
  }
  for (size_t i = 0; i < sorted.size(); ++i) {
    shards[2 * i] = sorted[i].first;
    shards[2 * i + 1] = sorted[i].second;
  }
  *num_shards = static_cast<int64_t>(sorted.size());
  return num_pieces;
}

int64_t dk_cut(const dk_store* stores, const dk_span* spans, int64_t num_spans, int whole, int64_t most,
               dk_piece* pieces, int64_t* slots, int64_t* shards, int64_t* num_shards) {
  return without_throw(std::numeric_limits<int64_t>::min(), [&] {
    return cut(stores, spans, num_spans, whole, most, pieces, slots, shards, num_shards);
  });
}
