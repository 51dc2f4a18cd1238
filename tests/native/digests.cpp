// Prints what the native libraries compute of made-up input, a line a function: the same on every processor.
//
//     digests DATAKIT.so CKPTKIT.so TRAINER.so
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/ckptkit/ckptkit.h"
#include "../../csrc/datakit/datakit.h"
#include "../../csrc/ops/ops.h"

namespace {

uint64_t state = 1;
uint64_t next() {  // splitmix64
  uint64_t z = state += 0x9E3779B97F4A7C15ULL;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ z >> 27) * 0x94D049BB133111EBULL;
  return z ^ z >> 31;
}
double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53 * 4 - 2; }

template <class T>
std::vector<T> made(size_t count) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(uniform());
  return values;
}
template <>
std::vector<uint16_t> made(size_t count) {  // bfloat16
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) {
    const auto number = static_cast<float>(uniform());
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    value = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

struct Half {
  uint16_t bits;
};
template <>
std::vector<Half> made(size_t count) {  // of any size below 2
  std::vector<Half> values(count);
  for (Half& value : values) value.bits = static_cast<uint16_t>(next()) & 0xBFFFu;
  return values;
}

template <class T>
void print(const char* name, const std::vector<T>& values) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 0x100000001B3ULL;
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

void* library;
template <class Function>
Function found(const char* name) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) std::fprintf(stderr, "%s is missing\n", name), std::exit(1);
  return reinterpret_cast<Function>(symbol);
}
#define CALL(function) found<decltype(&function)>(#function)
void check(int code, const char* name) {
  if (code != 0) std::fprintf(stderr, "%s returned %d\n", name, code), std::exit(1);
}
void open(const char* path) {
  library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
}

void of_ckptkit() {
  std::vector<uint8_t> data(3 << 20);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(next());
  std::vector<uint64_t> hashes;
  for (const size_t size : {0, 1, 8, 16, 17, 128, 200, 240, 241, 1024, 1025, 4099, 1 << 20, (3 << 20) - 5})
    for (const int simd : {0, -1}) hashes.push_back(CALL(ck_xxh3_64)(data.data() + 3, size < 4 ? size : size - 3, simd, nullptr));
  print("ck_xxh3_64", hashes);
  std::vector<uint64_t> checksums(3);
  check(CALL(ck_checksums)(data.data(), data.size(), checksums.data()), "ck_checksums");
  print("ck_checksums", checksums);
  for (const int carryless : {0, -1}) {  // two tensors of one dim, one of them in two chunks
    const uint64_t begins[] = {0, 4096, 5003, 1 << 20}, tensors[] = {0, 1, 0}, offsets[] = {0, 0, 1024}, starts[] = {0, 0, 0};
    const uint64_t shapes[] = {1024, 907, ((1 << 20) - 5003) / 4}, wholes[] = {1024 + shapes[2], 907}, sizes[] = {4, 1};
    std::vector<uint64_t> sums(2);
    const ck_chunks chunks{3, 1, begins, tensors, offsets, shapes, starts, wholes, sizes, sums.data()};
    for (uint64_t at = 0; at < 1 << 20; at += 77777)
      CALL(ck_add_sums)(&chunks, data.data() + at, at, at + 77777 < 1 << 20 ? 77777 : (1 << 20) - at, carryless);
    print("ck_add_sums", sums);
  }
}

void of_datakit() {
  std::vector<int64_t> sources(5000), numbers(5000), samples(5000), edges{0, 1LL << 59, 1LL << 60, 3LL << 60, 1LL << 62};
  for (int64_t& sample : samples) sample = static_cast<int64_t>(next() >> 2);
  check(CALL(dk_rotation_locate)(12345, edges.data(), 4, samples.data(), 5000, sources.data(), numbers.data()), "locate");
  print("dk_rotation_locate", sources);
  print("dk_rotation_locate.numbers", numbers);
  const char before[] = "7/epoch/", after[] = "/store";
  for (const int64_t block_rows : {int64_t{0}, int64_t{50}}) {
    const dk_epochs epochs{before, sizeof before - 1, after, sizeof after - 1, 100003, block_rows};
    std::vector<int64_t> zeros(5000), elements(5000);
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int64_t>(next() % 1000000);
    CALL(dk_elements)(&epochs, zeros.data(), numbers.data(), 5000, elements.data());
    print("dk_elements", elements);
  }
  std::vector<double> weights{0.1, 0.7, 1.0 / 3, 0.123456789, 1e-3, 0.25, 0.9999};
  std::vector<uint16_t> chosen(20000);
  std::vector<int64_t> counts(7 * 21);
  check(CALL(dk_greedy_blend)(weights.data(), 7, 20000, 1000, chosen.data(), counts.data()), "dk_greedy_blend");
  print("dk_greedy_blend", chosen);
  std::vector<int32_t> lengths(3000);
  for (int32_t& length : lengths) length = static_cast<int32_t>(next() % 900);
  const int64_t num_pieces = CALL(dk_count_pieces)(lengths.data(), 3000, 512);
  std::vector<int64_t> ends(num_pieces), starts(num_pieces);
  std::vector<int32_t> sizes(num_pieces);
  CALL(dk_pack)(lengths.data(), 3000, 0, 512, 1, ends.data(), starts.data(), sizes.data());
  print("dk_pack", starts);
  std::vector<uint16_t> tokens(4 * 33);
  for (uint16_t& token : tokens) token = static_cast<uint16_t>(next());
  std::vector<dk_piece> pieces;
  for (int64_t row = 0; row < 4; ++row) pieces.push_back({row, reinterpret_cast<int64_t>(&tokens[33 * row]), 33, 2, 1});
  std::vector<int64_t> out(4 * 32), labels(4 * 32), positions(4 * 32), eod(4, tokens[5]);
  std::vector<float> mask(4 * 32);
  check(CALL(dk_gather)(pieces.data(), 4, 4, 32, eod.data(), 1, 1, out.data(), labels.data(), positions.data(),
                        mask.data(), 2), "dk_gather");
  print("dk_gather", labels);
  print("dk_gather.positions", positions);
}

template <class T, class Number>
void of_ops(int dtype, const char* name) {
  std::printf("%s\n", name);
  constexpr int64_t kRows = 13, kCols = 70;
  std::vector<T> x = made<T>(kRows * kCols), residual = made<T>(kRows * kCols), weight = made<T>(kCols), bias = made<T>(kCols);
  for (const int norm : {OP_RMSNORM, OP_LAYERNORM}) {
    std::vector<T> sum(x.size()), y(x.size()), dx(x.size());
    std::vector<Number> numbers(2 * kRows), dweights(2 * kCols);
    check(CALL(op_add_norm_forward)(dtype, norm, x.data(), residual.data(), weight.data(),
                                    norm == OP_LAYERNORM ? bias.data() : nullptr, sum.data(), y.data(), numbers.data(),
                                    kRows, kCols, 1e-5, 2), "op_add_norm_forward");
    print("op_add_norm_forward", y);
    std::vector<Number> partials(CALL(op_add_norm_partials)(kRows) * dweights.size());
    check(CALL(op_add_norm_backward)(dtype, norm, residual.data(), x.data(), sum.data(), weight.data(), numbers.data(),
                                     dx.data(), dweights.data(), partials.data(), kRows, kCols, 2), "op_add_norm_backward");
    print("op_add_norm_backward", dx);
    print("op_add_norm_backward.dweights", dweights);
  }
  std::vector<T> qkv = made<T>(kRows * 6 * 10), out(kRows * 5 * 10), dqkv(qkv.size());
  const std::vector<Number> turns = made<Number>(kRows * 10);
  const std::vector<T> q_weight = made<T>(10), k_weight = made<T>(10);
  const op_heads heads{kRows, 4, 1, 10, turns.data(), q_weight.data(), k_weight.data(), 1e-5};
  check(CALL(op_rope_forward)(dtype, &heads, qkv.data(), out.data(), 50, 2), "op_rope_forward");
  print("op_rope_forward", out);
  const op_head_gradients gradients{qkv.data(), qkv.data() + 40, qkv.data() + 50, 60, 10, 60, 10, 60, 10};
  std::vector<Number> dweights(20), partials(CALL(op_rope_partials)(&heads) * 20);
  check(CALL(op_rope_backward)(dtype, &heads, &gradients, qkv.data(), dqkv.data(), dweights.data(), partials.data(), 2),
        "op_rope_backward");
  print("op_rope_backward", dqkv);
  for (const int activation : {OP_SWIGLU, OP_GELU}) {
    const int64_t cols = activation == OP_SWIGLU ? kCols / 2 : kCols;
    std::vector<T> y(kRows * cols), dx(x.size());
    check(CALL(op_activation_forward)(dtype, activation, x.data(), y.data(), kRows, cols, 2), "op_activation_forward");
    print("op_activation_forward", y);
    check(CALL(op_activation_backward)(dtype, activation, residual.data(), x.data(), dx.data(), nullptr, kRows, cols, 2),
          "op_activation_backward");
    print("op_activation_backward", dx);
  }
  std::vector<int64_t> labels(kRows, 5);
  std::vector<T> values = x;
  const op_logits logits{values.data(), kRows, kCols, kCols, kCols - 3, 0, labels.data()};
  std::vector<Number> sums(3 * kRows), factors(3 * kRows, Number{0.125});
  check(CALL(op_cross_entropy_forward)(dtype, &logits, sums.data(), 2), "op_cross_entropy_forward");
  print("op_cross_entropy_forward", sums);
  check(CALL(op_cross_entropy_backward)(dtype, &logits, factors.data(), 2), "op_cross_entropy_backward");
  print("op_cross_entropy_backward", values);
  const op_mask mask{3, 4, 1, 0, 2, 0, 0, 0.25};
  std::vector<T> dropped(x.size());
  check(CALL(op_dropout)(dtype, x.data(), dropped.data(), 1, kRows, kCols, &mask, 2), "op_dropout");
  print("op_dropout", dropped);
  const int64_t box[] = {30, 50}, whole[] = {100, 80}, offset[] = {7, 11};
  std::vector<T> normal(30 * 50);
  check(CALL(op_normal)(dtype, normal.data(), 99, 2, box, whole, offset, 0.02, 2), "op_normal");
  print("op_normal", normal);
}

template <class T, class Number>
void of_experts(int dtype, const char* name) {
  std::printf("%s\n", name);
  constexpr int64_t kRows = 13, kCols = 70;
  const std::vector<T> x = made<T>(kRows * kCols), residual = made<T>(kRows * kCols);
  constexpr int64_t kTokens = 4, kExperts = 3;  // of three rows each
  std::vector<int64_t> experts(kTokens * 3), rows(experts.size()), counts(kExperts), places(experts.size());
  for (int64_t& expert : experts) expert = static_cast<int64_t>(next() % kExperts);
  std::vector<int64_t> starts(CALL(op_sort_rows_partials)(kTokens * 3) * kExperts);
  check(CALL(op_sort_rows)(OP_I64, experts.data(), kTokens * 3, kExperts, rows.data(), counts.data(), starts.data(), 2),
        "op_sort_rows");
  print("op_sort_rows", rows);
  std::vector<T> gathered(kTokens * 3 * kCols), combined(kTokens * kCols);
  check(CALL(op_gather_rows)(dtype, x.data(), rows.data(), nullptr, gathered.data(), kTokens * 3, kCols, 3, 2),
        "op_gather_rows");
  print("op_gather_rows", gathered);
  check(CALL(op_combine_rows)(dtype, x.data(), rows.data(), nullptr, places.data(), combined.data(), kTokens * 3,
                              kTokens, kCols, 3, 2),
        "op_combine_rows");
  print("op_combine_rows", combined);
  const std::vector<Number> row_weights = made<Number>(kRows);
  std::vector<Number> drow_weights(kRows);
  std::vector<T> product(kRows * kCols / 2), dpacked(x.size());
  check(CALL(op_weighted_swiglu_forward)(dtype, x.data(), row_weights.data(), nullptr, product.data(), kRows,
                                         kCols / 2, 2),
        "op_weighted_swiglu_forward");
  print("op_weighted_swiglu_forward", product);
  check(CALL(op_weighted_swiglu_backward)(dtype, residual.data(), x.data(), row_weights.data(), nullptr, dpacked.data(),
                                          drow_weights.data(), product.data(), kRows, kCols / 2, 2),
        "op_weighted_swiglu_backward");
  print("op_weighted_swiglu_backward", dpacked);
  print("op_weighted_swiglu_backward.dweights", drow_weights);
}

template <class T>
void of_adamw(int dtype) {
  constexpr int64_t kCount = 1003;
  std::vector<T> gradient = made<T>(kCount), first = made<T>(kCount), second = made<T>(kCount), master = made<T>(kCount);
  for (T& value : second) value *= value;
  const op_interval interval{gradient.data(), first.data(), second.data(), master.data(), nullptr, kCount, 1, 0, 0, 2};
  const op_chunk chunks[] = {{0, 0, 512}, {0, 512, kCount}};
  const op_adamw_step step{3e-4, 0.9, 0.95, 1e-8, 0.1, 7, dtype, 0};
  const double factor = 0.3;
  const float is_bad = 0;
  check(CALL(op_adamw)(dtype, &interval, chunks, 2, &step, &factor, &is_bad, 2), "op_adamw");
  print("op_adamw", master);
  print("op_adamw.second", second);
  std::vector<double> partials(2), norms(1);
  check(CALL(op_squared_norms)(dtype, &interval, 1, chunks, 2, partials.data(), norms.data(), 2), "op_squared_norms");
  print("op_squared_norms", norms);
}

}  // namespace

int main(int count, char** paths) {
  if (count != 4) return 2;
  open(paths[1]);
  of_datakit();
  open(paths[2]);
  of_ckptkit();
  open(paths[3]);
  of_ops<double, double>(OP_F64, "fp64");
  of_ops<float, float>(OP_F32, "fp32");
  of_ops<uint16_t, float>(OP_BF16, "bf16");
  of_adamw<double>(OP_F64);
  of_adamw<float>(OP_F32);
  of_experts<double, double>(OP_F64, "fp64");
  of_experts<float, float>(OP_F32, "fp32");
  of_experts<uint16_t, float>(OP_BF16, "bf16");
  of_ops<Half, float>(OP_F16, "fp16");
  of_experts<Half, float>(OP_F16, "fp16");
  return 0;
}
