// Checks of documents, each with its origin: made when a shard is written, compared when a block of it was fetched.
#include <cerrno>
#include <cstring>
#include <vector>

#include "../calls.h"
#include "../hashing/xxh3.h"
#include "../mapped/mapped.h"
#include "datakit.h"

namespace {

struct Origin {
  uint64_t offset;
  uint32_t source, line;
};

}  // namespace

static int check(const uint8_t* tokens, const int64_t* sizes, int64_t num_documents, const uint64_t* offsets,
                 const uint32_t* sources, const uint32_t* lines, uint32_t* checks) {
  std::vector<uint8_t> hashed;  // a hash of one piece costs less than one of two, though these are copied for it
  for (int64_t i = 0; i < num_documents; ++i) {
    const Origin origin{offsets[i], sources[i], lines[i]};
    const auto size = static_cast<size_t>(sizes[i]);
    if (hashed.size() < sizeof origin + size) hashed.resize(sizeof origin + size);
    std::memcpy(hashed.data(), &origin, sizeof origin);
    const void* const address = mapped::read([&] {
      if (size > 0) std::memcpy(hashed.data() + sizeof origin, tokens, size);
    });
    if (address != nullptr) return mapped::unread(address);
    checks[i] = static_cast<uint32_t>(hashing::xxh3_64(hashed.data(), sizeof origin + size));
    tokens += size;
  }
  return 0;
}

int dk_check_documents(const uint8_t* tokens, const int64_t* sizes, int64_t num_documents, const uint64_t* offsets,
                       const uint32_t* sources, const uint32_t* lines, uint32_t* checks) {
  return without_throw(-ENOMEM, [&] { return check(tokens, sizes, num_documents, offsets, sources, lines, checks); });
}
