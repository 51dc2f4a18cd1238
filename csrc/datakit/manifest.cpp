// Fast ways for stores of many shards: their manifest read without a JSON tree, their files' sizes without Python.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "datakit.h"

namespace {

const char* const FILES[] = {"bin", "idx", "origin"};

// Reads a text front to back; once something is not as expected, `good` is false for good and nothing else is read.
struct Scanner {
  const char* at;
  const char* end;
  bool good = true;

  bool next_is(std::string_view text) const {
    return end - at >= static_cast<int64_t>(text.size()) && std::memcmp(at, text.data(), text.size()) == 0;
  }
  void skip(std::string_view text) {
    good = good && next_is(text);
    if (good) at += text.size();
  }
  // A whole number from 0 below 2^63, without leading zeros.
  int64_t number() {
    const char* const begin = at;
    int64_t value = 0;
    for (; good && at < end && *at >= '0' && *at <= '9'; ++at) {
      const int64_t digit = *at - '0';
      good = value <= (INT64_MAX - digit) / 10;
      if (good) value = 10 * value + digit;
    }
    good = good && at > begin && (*begin != '0' || at == begin + 1);
    return value;
  }
  // Characters of names up to a quotation mark, at least one.
  std::string_view name() {
    const char* const begin = at;
    const auto fits = [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    };
    while (good && at < end && fits(*at)) ++at;
    good = good && at > begin;
    return {begin, static_cast<size_t>(at - begin)};
  }
};

// Appends to memory that is as large as the text that is read, of which it keeps less.
struct Appender {
  char* at;

  Appender& operator<<(std::string_view text) {
    std::memcpy(at, text.data(), text.size());
    at += text.size();
    return *this;
  }
};

struct Shard {
  std::string_view name, num_documents, num_tokens, first_line, sizes[3], digests[3];
};

}  // namespace

int64_t dk_scan_shards(const char* text, int64_t start, int64_t num_bytes, int64_t most, dk_shard* shards, char* sorted,
                       char* content, int64_t* lengths) {
  Scanner scanner{text + start, text + num_bytes};
  Appender all{sorted}, identity{content};
  const auto number = [&](int64_t& value) {
    const char* const begin = scanner.at;
    value = scanner.number();
    return std::string_view{begin, static_cast<size_t>(scanner.at - begin)};
  };
  scanner.skip("[\n");
  int64_t count = 0;
  for (; scanner.good && count < most; ++count) {
    dk_shard& row = shards[count];
    Shard shard;
    scanner.skip("    {\n      \"name\": \"");
    shard.name = scanner.name();
    scanner.skip("\",\n      \"num_documents\": ");
    shard.num_documents = number(row.num_documents);
    scanner.skip(",\n      \"num_tokens\": ");
    shard.num_tokens = number(row.num_tokens);
    scanner.skip(",\n      \"first_line\": ");
    shard.first_line = number(row.first_line);
    for (int i = 0; i < 3; ++i) {
      scanner.skip(",\n      \"");
      scanner.skip(FILES[i]);
      scanner.skip("\": {\n        \"size_bytes\": ");
      shard.sizes[i] = number(row.size_bytes[i]);
      scanner.skip(",\n        \"xxh3_64\": \"");
      shard.digests[i] = scanner.name();
      scanner.skip("\"\n      }");
      row.digest_at[i] = shard.digests[i].data() - text;
      scanner.good = scanner.good && shard.digests[i].size() == 16;
    }
    scanner.skip("\n    }");
    if (!scanner.good) return -1;
    row.name_at = shard.name.data() - text;
    row.name_bytes = static_cast<int64_t>(shard.name.size());
    const auto file = [&](int i) {
      all << "\"" << FILES[i] << "\":{\"size_bytes\":" << shard.sizes[i] << ",\"xxh3_64\":\"" << shard.digests[i] << "\"},";
    };
    all << (count ? ",{" : "[{");
    file(0);
    all << "\"first_line\":" << shard.first_line << ",";
    file(1);
    all << "\"name\":\"" << shard.name << "\",\"num_documents\":" << shard.num_documents
        << ",\"num_tokens\":" << shard.num_tokens << ",";
    file(2);
    all.at[-1] = '}';  // in place of the comma
    identity << (count ? ",[" : "[[") << shard.num_tokens << ",\"" << shard.digests[0] << "\"]";
    if (!scanner.next_is(",\n")) {
      scanner.skip("\n  ]");
      lengths[0] = (all << "]").at - sorted;
      lengths[1] = (identity << "]").at - content;
      lengths[2] = scanner.at - text;
      return scanner.good ? count + 1 : -1;
    }
    scanner.skip(",\n");
  }
  return -1;
}

int64_t dk_find_misfit(const char* folder, const char* text, const dk_shard* shards, int64_t num_shards) {
  const int descriptor = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return -errno;
  int64_t number = 0;
  char path[NAME_MAX + 16];
  for (; number < num_shards; ++number) {
    const dk_shard& shard = shards[number];
    bool fits = true;
    for (int i = 0; fits && i < 3; ++i) {
      struct stat found;
      const int name_bytes = static_cast<int>(std::min<int64_t>(shard.name_bytes, NAME_MAX + 1));
      std::snprintf(path, sizeof path, "%.*s.%s", name_bytes, text + shard.name_at, FILES[i]);
      fits = fstatat(descriptor, path, &found, 0) == 0 && found.st_size == shard.size_bytes[i];
    }
    if (!fits) break;
  }
  close(descriptor);
  return number;
}
