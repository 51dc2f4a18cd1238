// Files of a block cache: one call for many of them, as each call from Python costs its thread the interpreter.
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "../calls.h"
#include "datakit.h"

namespace {

constexpr time_t recently_s = 1;      // the time of a last use is known about so well
constexpr int64_t page_bytes = 4096;  // a file takes whole pages of the disk
constexpr char process_prefix[] = ".process-";

enum Rank { unneeded, needed };  // which files go first

// A file of the folder; they are sorted in the order in which they go.
struct Entry {
  Rank rank;
  int64_t used_ns;
  std::string name;
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

bool is_old(const struct stat& status) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec - status.st_mtim.tv_sec > recently_s;
}

int64_t room_of(const struct stat& status) { return (status.st_size + page_bytes - 1) / page_bytes * page_bytes; }

using Folder = std::unique_ptr<DIR, int (*)(DIR*)>;

// Opens a folder in another one, or in the current one.
Folder open_entries(int parent, const char* name) {
  const int number = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  Folder opened(number < 0 ? nullptr : fdopendir(number), closedir);
  if (number >= 0 && !opened) close(number);
  return opened;
}

// What files take, each once by however many names.
class Taken {
 public:
  void add(const struct stat& status) {
    int64_t& counted = by_file_[status.st_ino];
    const int64_t grown = std::max(counted, room_of(status));  // it may have been written on since
    total_ += grown - counted;
    counted = grown;
  }
  int64_t total() const { return total_; }

 private:
  std::unordered_map<ino_t, int64_t> by_file_;
  int64_t total_ = 0;
};

// Adds what a process holds and returns whether it lives; a folder that is no longer locked is one of a process that is over,
// and is removed.
bool add_process(int cache, const char* name, Taken& taken) {
  const Folder opened = open_entries(cache, name);
  if (!opened) return false;
  const int folder = dirfd(opened.get());
  const bool is_over = flock(folder, LOCK_EX | LOCK_NB) == 0;
  while (const dirent* entry = readdir(opened.get())) {
    struct stat status;
    if (fstatat(folder, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode)) continue;
    if (is_over) {
      unlinkat(folder, entry->d_name, 0);
    } else {
      taken.add(status);
    }
  }
  if (is_over) unlinkat(cache, name, AT_REMOVEDIR);
  return !is_over;
}

// Removes a block and returns the bytes that are free by that: none if a process has come to hold it, or it is gone already.
// A negative errno if it cannot be removed.
int64_t remove_block(int folder, const char* name) {
  const Descriptor file(openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC));
  if (file < 0) return errno == ENOENT ? 0 : -errno;
  if (unlinkat(folder, name, 0) != 0) return errno == ENOENT ? 0 : -errno;
  struct stat status;
  if (fstat(file, &status) != 0) return -errno;
  return status.st_nlink == 0 ? room_of(status) : 0;
}

// Writes a file under a hidden name, and then renames it; 0, or a negative errno.
int64_t write_block(int process, const char* hidden, int folder, const char* name, const char* content, int64_t num_bytes) {
  const Descriptor file(openat(process, hidden, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (file < 0) return -errno;
  int64_t code = 0;
  for (int64_t done = 0; done < num_bytes && !code;) {
    const ssize_t count = write(file, content + done, num_bytes - done);
    if (count >= 0) {
      done += count;
    } else if (errno != EINTR) {
      code = -errno;
    }
  }
  if (!code && renameat(process, hidden, folder, name) != 0) code = -errno;
  if (code) unlinkat(process, hidden, 0);
  return code;
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

static int64_t write_all(const char* folder, const char* process, const char* room, const char* names,
                         const void* const* contents, const int64_t* sizes, int64_t num_blocks) {
  const Descriptor opened(open_folder(folder)), own(open_folder(process));
  if (opened < 0 || own < 0) return -errno;
  const Descriptor reserved(openat(own, room, O_WRONLY | O_CLOEXEC));
  if (reserved < 0) return -errno;
  const std::string hidden = std::string(room) + ".tmp";
  int64_t rest = 0;
  for (int64_t i = 0; i < num_blocks; ++i) rest += (sizes[i] + page_bytes - 1) / page_bytes * page_bytes;
  for (int64_t i = 0; i < num_blocks; ++i, names += std::strlen(names) + 1) {
    const int64_t code = write_block(own, hidden.c_str(), opened, names, static_cast<const char*>(contents[i]), sizes[i]);
    if (code) return code;
    rest -= (sizes[i] + page_bytes - 1) / page_bytes * page_bytes;
    if (ftruncate(reserved, rest) != 0) return -errno;  // only now, so that whoever counts finds one of the two
  }
  return 0;
}

int64_t dk_write_blocks(const char* folder, const char* process, const char* room, const char* names,
                        const void* const* contents, const int64_t* sizes, int64_t num_blocks) {
  return without_throw(int64_t{-ENOMEM}, [&] { return write_all(folder, process, room, names, contents, sizes, num_blocks); });
}

static int64_t evict(const char* folder, const char* names, int64_t num_needed, int64_t most, int64_t wanted,
                     int64_t* num_processes) {
  const Folder opened(opendir(folder), closedir);
  if (!opened) return -errno;
  std::unordered_set<std::string_view> needed_names;
  for (int64_t i = 0; i < num_needed; ++i, names += std::strlen(names) + 1) needed_names.insert(names);
  std::vector<Entry> entries;
  Taken taken;
  *num_processes = 0;
  while (const dirent* each = readdir(opened.get())) {  // first, as what a process writes moves to the blocks
    if (std::string_view(each->d_name).substr(0, sizeof process_prefix - 1) == process_prefix) {
      *num_processes += add_process(dirfd(opened.get()), each->d_name, taken);
    }
  }
  rewinddir(opened.get());
  while (const dirent* each = readdir(opened.get())) {
    const std::string_view name = each->d_name;
    struct stat status;
    if (name[0] == '.') continue;
    if (fstatat(dirfd(opened.get()), each->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(status.st_mode)) continue;
    taken.add(status);
    if (status.st_nlink > 1) continue;  // a process holds it, so that its room would not be free
    const Rank rank = needed_names.count(name) ? needed : unneeded;
    entries.push_back({rank, status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec, each->d_name});
  }
  int64_t total = taken.total();
  std::sort(entries.begin(), entries.end());
  for (const Entry& each : entries) {
    if (total <= (each.rank == needed ? most : wanted)) break;
    const int64_t freed = remove_block(dirfd(opened.get()), each.name.c_str());
    if (freed < 0) return freed;
    total -= freed;
  }
  return total;
}

int64_t dk_evict_blocks(const char* folder, const char* names, int64_t num_needed, int64_t most, int64_t wanted,
                        int64_t* num_processes) {
  return without_throw(int64_t{-ENOMEM}, [&] { return evict(folder, names, num_needed, most, wanted, num_processes); });
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

int64_t dk_map_blocks(const char* folder, const char* process, const char* names, const int64_t* sizes, int64_t num_blocks,
                      void** addresses) {
  const Descriptor opened(open_folder(folder)), own(open_folder(process));
  if (opened < 0 || own < 0) return -errno;
  for (int64_t i = 0; i < num_blocks; ++i, names += std::strlen(names) + 1) {
    addresses[i] = nullptr;
    const bool is_new = linkat(opened, names, own, names, 0) == 0;
    if (!is_new && errno != EEXIST) continue;
    const Descriptor file(openat(own, names, O_RDONLY | O_CLOEXEC));
    struct stat status;
    if (file >= 0 && fstat(file, &status) == 0 && status.st_size == sizes[i]) {
      if (is_old(status)) futimens(file, nullptr);
      void* const address = mmap(nullptr, sizes[i], PROT_READ, MAP_SHARED, file, 0);
      if (address != MAP_FAILED) addresses[i] = address;
    }
    if (is_new && !addresses[i]) unlinkat(own, names, 0);
  }
  return 0;
}
