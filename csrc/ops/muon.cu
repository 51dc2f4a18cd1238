// Muon's passes over state on CUDA: one launch walks the chunks of all parts, one block a chunk.
//
// One before the exchange reads gradient and moment, and writes moment and direction; one behind it reads update and master,
// and writes master and weight. Both take the roundings that torch's lerp, mul and add have one after the other, in which a
// product is fused with the sum behind it.
#include "device.cuh"
#include "masters.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 4;

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// torch's: from the nearer end.
template <class Number>
__device__ __forceinline__ Number lerp(Number start, Number end, Number weight) {
  const Number way = minus(end, start);
  return weight < Number(0.5) ? fused(weight, way, start) : fused(-way, minus(Number(1), weight), end);
}

template <class Number, class Moment, class Direction>
struct Averages {
  const Number* gradient;
  Moment* moment;
  Direction* direction;  // or null
  Number scale, share, momentum;
  bool is_good;

  // Averages packs of kSize elements, from element `begin` on; a thread has some under way at once.
  template <int kSize>
  __device__ __forceinline__ void run(int begin, int num_packs) const {
    const auto gradients = reinterpret_cast<const Pack<Number, kSize>*>(gradient + begin);
    const auto moments = reinterpret_cast<Pack<Moment, kSize>*>(moment + begin);
    const auto directions = reinterpret_cast<Pack<Direction, kSize>*>(direction ? direction + begin : nullptr);
    for (int first = threadIdx.x; first < num_packs; first += kAtOnce * kThreads) {
      Pack<Number, kSize> g[kAtOnce];
      Pack<Moment, kSize> m[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int pack = first + j * kThreads;
        if (pack < num_packs) g[j] = gradients[pack], m[j] = moments[pack];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int pack = first + j * kThreads;
        if (pack >= num_packs) break;
        Number averages[kSize], means[kSize];
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          const Number own = times(g[j].v[e], scale);
          averages[e] = lerp(Number(m[j].get(e)), own, share);
          means[e] = lerp(own, averages[e], momentum);
        }
        if (is_good) {
          m[j].set(averages);
          moments[pack] = m[j];
        }
        if (directions) {
          Pack<Direction, kSize> rounded;
          rounded.set(means);
          directions[pack] = rounded;
        }
      }
    }
  }
};

template <class Number, class Master, class Weight, class Direction>
struct Steps {
  const Direction* update;
  Master* master;
  Weight* published;
  Number keep, rate;

  template <int kSize>
  __device__ __forceinline__ void run(int begin, int num_packs) const {
    const auto updates = reinterpret_cast<const Pack<Direction, kSize>*>(update + begin);
    const auto weights = [=](int pack) { return published ? published + begin + pack * kSize : nullptr; };
    for (int first = threadIdx.x; first < num_packs; first += kAtOnce * kThreads) {
      Pack<Direction, kSize> u[kAtOnce];
      Number p[kAtOnce][kSize];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int pack = first + j * kThreads;
        if (pack >= num_packs) break;
        u[j] = updates[pack];
        load_masters(master + begin + pack * kSize, weights(pack), p[j]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int pack = first + j * kThreads;
        if (pack >= num_packs) break;
#pragma unroll
        for (int e = 0; e < kSize; ++e) p[j][e] = fused(-rate, Number(u[j].get(e)), times(p[j][e], keep));
        store_masters(master + begin + pack * kSize, weights(pack), p[j]);
      }
    }
  }
};

// Runs over a chunk's elements: in packs if all that is read and written is aligned to them.
template <int kSize, class Body>
__device__ __forceinline__ void in_packs(const Body& body, const op_chunk& chunk, bool are_aligned) {
  const int count = static_cast<int>(chunk.end - chunk.begin), num_packs = are_aligned ? count / kSize : 0;
  body.template run<kSize>(0, num_packs);
  body.template run<1>(num_packs * kSize, count - num_packs * kSize);
}

template <class Number, class Moment, class Direction>
__global__ void __launch_bounds__(kThreads)
    average(const op_muon_part* __restrict__ parts, const op_chunk* __restrict__ chunks, op_muon_step step,
            const double* __restrict__ factor, const float* __restrict__ is_bad, Direction* directions) {
  constexpr int kSize = kPackSize<Number>;
  const op_chunk chunk = chunks[blockIdx.x];
  const op_muon_part& part = parts[chunk.interval];
  Averages<Number, Moment, Direction> made;
  made.gradient = global<const Number>(part.gradient, chunk.begin);
  made.moment = global<Moment>(part.moment, chunk.begin);
  made.direction = part.sent < 0 ? nullptr : directions + part.sent + chunk.begin;
  made.scale = static_cast<Number>(*factor);
  made.share = static_cast<Number>(minus(1.0, step.momentum));
  made.momentum = static_cast<Number>(step.momentum);
  made.is_good = !(*is_bad > 0);
  in_packs<kSize>(made, chunk,
                  is_aligned(made.gradient, sizeof(Number) * kSize) && is_aligned(made.moment, sizeof(Moment) * kSize) &&
                      is_aligned(made.direction, sizeof(Direction) * kSize));
}

template <class Number, class Master, class Weight, class Direction>
__global__ void __launch_bounds__(kThreads)
    update(const op_muon_part* __restrict__ parts, const op_chunk* __restrict__ chunks, op_muon_step step,
           const float* __restrict__ is_bad, const Direction* updates) {
  if (*is_bad > 0) return;
  constexpr int kSize = kPackSize<Number>;
  const op_chunk chunk = chunks[blockIdx.x];
  const op_muon_part& part = parts[chunk.interval];
  const double rate = times(step.lr, part.rate);
  Steps<Number, Master, Weight, Direction> made;
  made.update = updates + part.returned + chunk.begin;
  made.master = global<Master>(part.master, chunk.begin);
  made.published = part.published ? static_cast<Weight*>(part.published) + chunk.begin : nullptr;
  made.keep = static_cast<Number>(minus(1.0, times(times(rate, step.weight_decay), part.decay)));
  made.rate = static_cast<Number>(times(rate, part.scale));
  in_packs<kSize>(made, chunk,
                  is_aligned(made.update, sizeof(Direction) * kSize) && is_aligned(made.master, sizeof(Master) * kSize) &&
                      is_aligned(made.published, sizeof(Weight) * kSize));
}

bool fits(int dtype, const op_muon_step& step, int64_t num_chunks) {
  if (num_chunks < 0 || num_chunks > INT32_MAX) return false;
  if (dtype == OP_F64) return step.moments == OP_F64 && !step.is_split;
  if (step.is_split && step.published == OP_F16) return false;
  return dtype == OP_F32 && (step.moments == OP_F32 || step.moments == OP_BF16);
}

}  // namespace

int op_muon_direction_cuda(int dtype, const op_muon_part* parts, const op_chunk* chunks, int64_t num_chunks,
                           const op_muon_step* step, const double* factor, const float* is_bad, void* directions,
                           void* stream) {
  if (!fits(dtype, *step, num_chunks)) return OP_BAD_ARGUMENT;
  if (num_chunks == 0) return 0;
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto num_blocks = static_cast<unsigned>(num_chunks);
  if (dtype == OP_F64) {
    average<double, double, double><<<num_blocks, kThreads, 0, queue>>>(parts, chunks, *step, factor, is_bad,
                                                                         static_cast<double*>(directions));
  } else {
    const auto run = step->moments == OP_BF16 ? average<float, Bf16, Bf16> : average<float, float, Bf16>;
    run<<<num_blocks, kThreads, 0, queue>>>(parts, chunks, *step, factor, is_bad, static_cast<Bf16*>(directions));
  }
  return launch_status();
}

int op_muon_update_cuda(int dtype, const op_muon_part* parts, const op_chunk* chunks, int64_t num_chunks,
                        const op_muon_step* step, const float* is_bad, const void* updates, void* stream) {
  if (!fits(dtype, *step, num_chunks)) return OP_BAD_ARGUMENT;
  if (num_chunks == 0) return 0;
  const auto queue = static_cast<cudaStream_t>(stream);
  const auto num_blocks = static_cast<unsigned>(num_chunks);
  if (dtype == OP_F64) {
    update<double, double, Bf16, double><<<num_blocks, kThreads, 0, queue>>>(parts, chunks, *step, is_bad,
                                                                              static_cast<const double*>(updates));
  } else {
    const auto run = step->is_split                ? update<float, int16_t, Bf16, Bf16>
                     : step->published == OP_F16 ? update<float, float, Half, Bf16>
                                                   : update<float, float, Bf16, Bf16>;
    run<<<num_blocks, kThreads, 0, queue>>>(parts, chunks, *step, is_bad, static_cast<const Bf16*>(updates));
  }
  return launch_status();
}
