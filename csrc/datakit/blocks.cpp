// Files of a block cache: one call for many of them, as each call from Python costs its thread the interpreter.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "datakit.h"

namespace {

constexpr time_t recently_s = 1;  // the time of a last use is known about so well

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

int64_t dk_map_block(const char* path, int64_t num_bytes, void** address) {
  const Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
  if (file < 0) return -errno;
  struct stat status;
  if (fstat(file, &status) != 0) return -errno;
  if (status.st_size != num_bytes) return -ENOENT;
  if (is_old(status)) futimens(file, nullptr);
  *address = mmap(nullptr, num_bytes, PROT_READ, MAP_SHARED, file, 0);
  return *address == MAP_FAILED ? -errno : 0;
}
