// Files of a block cache: one call for many of them, as each call from Python costs its thread the interpreter.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "../calls.h"
#include "datakit.h"

namespace {

constexpr time_t recently_s = 1;  // the time of a last use is known about so well
constexpr time_t stale_s = 3600;  // a hidden file of this age is no longer written

enum Rank { stale, unneeded, needed };  // which files go first

// A file of the folder; they are sorted in the order in which they go.
struct Entry {
  Rank rank;
  int64_t used_ns;
  std::string name;
  int64_t num_bytes;
  bool operator<(const Entry& other) const {
    return std::tie(rank, used_ns, name) < std::tie(other.rank, other.used_ns, other.name);
  }
};

// A descriptor that is closed where its scope ends.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  operator int() const { return number_; }

 private:
  int number_;
};

int open_folder(const char* folder) { return open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

time_t age_s(const struct stat& status) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec - status.st_mtim.tv_sec;
}

bool is_old(const struct stat& status) { return age_s(status) > recently_s; }

bool is_temporary(std::string_view name) {
  constexpr std::string_view suffix = ".tmp";
  return name.size() > suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
}

// Writes a file without a name and then names it; 0, or a negative errno.
int64_t write_block(int folder, const char* name, const char* content, int64_t num_bytes) {
  const Descriptor file(openat(folder, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  if (file < 0) return -errno;
  for (int64_t done = 0; done < num_bytes;) {
    const ssize_t count = write(file, content + done, num_bytes - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    done += count;
  }
  char path[32];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", static_cast<int>(file));
  if (linkat(AT_FDCWD, path, folder, name, AT_SYMLINK_FOLLOW) != 0 && errno != EEXIST) return -errno;
  return 0;
}

}  // namespace

int64_t dk_find_blocks(const char* folder, const char* names, const int64_t* sizes, int64_t num_blocks, int64_t* found) {
  const Descriptor opened(open_folder(folder));
  if (opened < 0) return -errno;
  for (int64_t i = 0; i < num_blocks; ++i, names += std::strlen(names) + 1) {
    struct stat status;
    found[i] = 0;
    if (fstatat(opened, names, &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno != ENOENT) return -errno;
    } else if (status.st_size != sizes[i]) {
      unlinkat(opened, names, 0);
    } else {
      found[i] = 1;
      if (is_old(status)) utimensat(opened, names, nullptr, AT_SYMLINK_NOFOLLOW);
    }
  }
  return 0;
}

int64_t dk_write_blocks(const char* folder, const char* names, const void* const* contents, const int64_t* sizes,
                        int64_t num_blocks) {
  const Descriptor opened(open_folder(folder));
  if (opened < 0) return -errno;
  for (int64_t i = 0; i < num_blocks; ++i, names += std::strlen(names) + 1) {
    const int64_t code = write_block(opened, names, static_cast<const char*>(contents[i]), sizes[i]);
    if (code) return code;
  }
  return 0;
}

static int64_t evict(const char* folder, const char* names, int64_t num_needed, int64_t most, int64_t wanted) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(opendir(folder), closedir);
  if (!opened) return -errno;
  std::unordered_set<std::string_view> needed_names;
  for (int64_t i = 0; i < num_needed; ++i, names += std::strlen(names) + 1) needed_names.insert(names);
  std::vector<Entry> entries;
  int64_t total = 0;
  while (const dirent* each = readdir(opened.get())) {
    const std::string_view name = each->d_name;
    struct stat status;
    if (name[0] == '.' && !is_temporary(name)) continue;
    if (fstatat(dirfd(opened.get()), each->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode)) continue;
    total += status.st_size;
    if (name[0] == '.' && age_s(status) <= stale_s) continue;
    const Rank rank = name[0] == '.' ? stale : needed_names.count(name) ? needed : unneeded;
    entries.push_back({rank, status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec, each->d_name, status.st_size});
  }
  std::sort(entries.begin(), entries.end());
  for (const Entry& each : entries) {
    if (each.rank != stale && total <= (each.rank == needed ? most : wanted)) break;
    if (unlinkat(dirfd(opened.get()), each.name.c_str(), 0) != 0 && errno != ENOENT) return -errno;
    total -= each.num_bytes;
  }
  return total;
}

int64_t dk_evict_blocks(const char* folder, const char* names, int64_t num_needed, int64_t most, int64_t wanted) {
  return without_throw(int64_t{-ENOMEM}, [&] { return evict(folder, names, num_needed, most, wanted); });
}

int64_t dk_lock_bytes(int64_t file, const int64_t* places, int64_t num_places) {
  for (int64_t i = 0; i < num_places; ++i) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = places[i];
    lock.l_len = 1;
    if (fcntl(static_cast<int>(file), F_OFD_SETLK, &lock) == 0) continue;
    return errno == EAGAIN || errno == EACCES ? i : -errno;
  }
  return num_places;
}

int64_t dk_map_blocks(const char* folder, const char* names, const int64_t* sizes, int64_t num_blocks, void** addresses) {
  const Descriptor opened(open_folder(folder));
  if (opened < 0) return -errno;
  for (int64_t i = 0; i < num_blocks; ++i, names += std::strlen(names) + 1) {
    addresses[i] = nullptr;
    const Descriptor file(openat(opened, names, O_RDONLY | O_CLOEXEC));
    struct stat status;
    if (file < 0 || fstat(file, &status) != 0 || status.st_size != sizes[i]) continue;
    if (is_old(status)) futimens(file, nullptr);
    void* const address = mmap(nullptr, sizes[i], PROT_READ, MAP_SHARED, file, 0);
    if (address != MAP_FAILED) addresses[i] = address;
  }
  return 0;
}
