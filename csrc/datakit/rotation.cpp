// Random access into a rotation: how many of its earlier samples fall on an arc, by floor sums.
#include <algorithm>
#include <cerrno>
#include <vector>

#include "../calls.h"
#include "datakit.h"

namespace {

using u64 = uint64_t;
using u128 = unsigned __int128;

constexpr u64 kCircle = u64{1} << 62;
constexpr u64 kStep = 2850178704830799621;  // round((sqrt(5) - 1) / 2 * 2^62), made odd

// What Euclid's algorithm on (kStep, kCircle) meets, step by step: the same for all samples and points.
struct Level {
  u64 modulus;
  u64 quotient;    // of the multiplier by the modulus
  u64 multiplier;  // what remains of it
  u64 reciprocal;  // floor(2^64 * multiplier / modulus)
};

const std::vector<Level>& levels() {
  static const std::vector<Level> found = [] {
    std::vector<Level> list;
    for (u64 modulus = kCircle, multiplier = kStep; modulus != 0;) {
      const u64 rest = multiplier % modulus;
      list.push_back({modulus, multiplier / modulus, rest, static_cast<u64>((u128{rest} << 64) / modulus)});
      multiplier = modulus;
      modulus = rest;
    }
    return list;
  }();
  return found;
}

// sum(floor((kStep * i + b) / kCircle) for i in [0, n)) modulo 2^64, for n <= 2^62 and b < 2^63. Each level turns the sum
// over i into one over the quotients, which are fewer: n shrinks by the golden ratio.
u64 floor_sum(const std::vector<Level>& steps, u64 n, u64 b) {
  u64 total = 0;
  for (auto level = steps.begin(); n > 0; ++level) {
    const u64 turns = b < level->modulus ? 0 : b / level->modulus;
    const u64 pairs = n % 2 ? n * ((n - 1) / 2) : n / 2 * (n - 1);
    total += pairs * level->quotient + n * turns;
    b -= turns * level->modulus;
    // n, b = divmod(multiplier * n + b, modulus); the estimate is at most 2 too small, so 64 bits hold the remainder
    u64 quotient = static_cast<u64>((u128{n} * level->reciprocal) >> 64);
    u64 rest = level->multiplier * n + b - quotient * level->modulus;
    for (; rest >= level->modulus; rest -= level->modulus) ++quotient;
    n = quotient;
    b = rest;
  }
  return total;
}

// The sum that grows by one for each of the first samples that falls at `point` or beyond it.
u64 beyond(const std::vector<Level>& steps, u64 theta, u64 num_samples, u64 point) {
  return floor_sum(steps, num_samples, theta + (kCircle - point));
}

}  // namespace

void dk_rotation_counts(int64_t theta, const int64_t* points, int64_t num_points, int64_t num_samples,
                        int64_t* counts) {
  const auto& steps = levels();
  const u64 all = beyond(steps, theta, num_samples, 0);
  for (int64_t i = 0; i < num_points; ++i) {
    counts[i] = static_cast<int64_t>(all - beyond(steps, theta, num_samples, points[i]));
  }
}

static int locate(int64_t theta, const int64_t* edges, int64_t num_sources, const int64_t* samples,
                  int64_t num_samples, int64_t* sources, int64_t* numbers) {
  const auto& steps = levels();
  struct Next {  // the number that a source's next sample has, in the run of samples that follow each other
    int64_t run = -1, number = 0;
  };
  std::vector<Next> nexts(num_sources);
  int64_t run = 0;
  for (int64_t i = 0; i < num_samples; ++i) {
    const u64 sample = samples[i];
    if (i > 0 && samples[i] != samples[i - 1] + 1) ++run;
    const auto point = static_cast<int64_t>((kStep * sample + u64(theta)) % kCircle);
    const int64_t* const end = std::upper_bound(edges + 1, edges + num_sources + 1, point);
    const int64_t source = end - edges - 1;
    Next& next = nexts[source];
    if (next.run != run) {
      const u64 number = beyond(steps, theta, sample, end[-1]) - beyond(steps, theta, sample, end[0]);
      next = {run, static_cast<int64_t>(number)};
    }
    sources[i] = source;
    numbers[i] = next.number++;
  }
  return 0;
}

int dk_rotation_locate(int64_t theta, const int64_t* edges, int64_t num_sources, const int64_t* samples,
                       int64_t num_samples, int64_t* sources, int64_t* numbers) {
  return without_throw(-ENOMEM,
                       [&] { return locate(theta, edges, num_sources, samples, num_samples, sources, numbers); });
}
