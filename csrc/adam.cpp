// Implements adam.h: instruction set choice, the split of a call into blocks, and the portable kernels.
#include "adam.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "thread_pool.h"

#define TIERED_TARGET
#include "adam_loops.h"

namespace tiered {

const KernelTable scalar_kernels = TIERED_KERNEL_TABLE(Scalar);

namespace {

// Elements a thread takes at once in AdamW: 448 KiB of traffic, long against a wake-up, short against a large tensor.
constexpr int64_t kAdamBlock = 16384;

// Blocks of a sum that its caller runs alone: it is done with two, some 20 us, before a worker it woke has begun.
constexpr int64_t kAloneBlocks = 2;

// Runs its scope in the default floating-point environment: round to nearest, denormals kept, no traps. The calling
// thread may have been told otherwise (torch.set_flush_denormal), a worker not: results would depend on who ran what.
class DefaultFloatEnvironment {
 public:
#if defined(__x86_64__)
  DefaultFloatEnvironment() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(before_); }
#else
  DefaultFloatEnvironment() = default;
  ~DefaultFloatEnvironment() = default;
#endif
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  unsigned int before_;
#endif
};

const KernelTable& kernels_of(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return avx512_kernels;
  if (isa == Isa::avx2) return avx2_kernels;
#endif
  static_cast<void>(isa);
  return scalar_kernels;
}

size_t element_bytes(DType type) { return type == DType::fp32 ? 4 : 2; }

void* at(void* array, DType type, int64_t index) {
  return static_cast<char*>(array) + index * static_cast<int64_t>(element_bytes(type));
}

const void* at(const void* array, DType type, int64_t index) {
  return static_cast<const char*>(array) + index * static_cast<int64_t>(element_bytes(type));
}

AdamBlock block_at(const AdamArrays& arrays, int64_t index) {
  return {
      arrays.master + index,
      arrays.exp_avg + index,
      arrays.exp_avg_sq + index,
      at(arrays.grad, arrays.grad_type, index),
      arrays.param_out == nullptr ? nullptr : at(arrays.param_out, arrays.out_type, index),
  };
}

// Runs block_sum(first element, count) over the blocks of invariant 2 and adds the results in order.
template <class BlockSum>
double sum_blocks(int64_t n, int threads, const BlockSum& block_sum) {
  const int64_t blocks = (n + kSumBlock - 1) / kSumBlock;
  std::vector<double> partial(static_cast<size_t>(blocks));
  auto body = [&](int64_t block) {
    const DefaultFloatEnvironment environment;
    const int64_t first = block * kSumBlock;
    partial[static_cast<size_t>(block)] = block_sum(first, std::min(kSumBlock, n - first));
  };
  ThreadPool::shared().run(blocks, blocks <= kAloneBlocks ? 1 : threads, body);
  const DefaultFloatEnvironment environment;
  double total = 0.0;
  for (double sum : partial) total += sum;
  return total;
}

}  // namespace

bool isa_supported(Isa isa) {
  switch (isa) {
    case Isa::scalar:
      return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f");
#endif
    default:
      return false;
  }
}

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "scalar"; }

Isa isa_from_environment() {
  constexpr Isa widest_first[] = {Isa::avx512, Isa::avx2, Isa::scalar};
  const char* asked = std::getenv("TIERED_ISA");
  for (Isa isa : widest_first) {
    if (asked == nullptr || *asked == '\0') {
      if (isa_supported(isa)) return isa;
    } else if (std::string(asked) == isa_name(isa)) {
      if (isa_supported(isa)) return isa;
      throw std::invalid_argument("TIERED_ISA: got " + std::string(asked) +
                                  ", which this processor lacks; unset it to use the widest it has");
    }
  }
  throw std::invalid_argument("TIERED_ISA: got " + std::string(asked) + ", expected scalar, avx2 or avx512");
}

void adamw(const AdamUpdate* updates, size_t count, const AdamArrays& arrays, Isa isa, int threads) {
  // Blocks are cut from the updates laid end to end, so that thousands of tiny parameters share one block.
  std::vector<int64_t> ends(count);
  int64_t total = 0;
  for (size_t i = 0; i < count; ++i) ends[i] = total += updates[i].stop - updates[i].start;
  const size_t out = arrays.param_out == nullptr ? kDTypes : static_cast<size_t>(arrays.out_type);
  const KernelTable::Adamw kernel = kernels_of(isa).adamw[static_cast<size_t>(arrays.grad_type)][out];

  auto body = [&](int64_t block) {
    const DefaultFloatEnvironment environment;
    const int64_t block_end = std::min(total, (block + 1) * kAdamBlock);
    int64_t at = block * kAdamBlock;
    size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
    for (; at < block_end; ++i) {
      const int64_t n = std::min(ends[i], block_end) - at;
      kernel(updates[i], block_at(arrays, updates[i].stop - (ends[i] - at)), n);
      at += n;
    }
  };
  ThreadPool::shared().run((total + kAdamBlock - 1) / kAdamBlock, threads, body);
}

double accumulate(ArrayRef dst, ArrayRef src, int64_t n, bool add, Isa isa, int threads) {
  const auto& by_type = kernels_of(isa).accumulate[static_cast<size_t>(dst.type)][static_cast<size_t>(src.type)];
  const KernelTable::Accumulate kernel = by_type[add ? 1 : 0];
  return sum_blocks(n, threads, [&](int64_t first, int64_t block_n) {
    return kernel(at(dst.data, dst.type, first), at(src.data, src.type, first), block_n);
  });
}

double average(ArrayRef dst, const MeanSources& sources, int64_t n, bool add, Isa isa, int threads) {
  const bool power_of_two = (sources.divisor & (sources.divisor - 1)) == 0;
  const float divisor = static_cast<float>(sources.divisor);
  const Mean mean{sources.arrays, sources.count, power_of_two ? 1.0f / divisor : divisor, power_of_two};
  const auto& by_type = kernels_of(isa).average[static_cast<size_t>(dst.type)][static_cast<size_t>(sources.type)];
  const KernelTable::Average kernel = by_type[add ? 1 : 0];
  return sum_blocks(n, threads, [&](int64_t first, int64_t block_n) {
    return kernel(at(dst.data, dst.type, first), mean, first, block_n);
  });
}

double sum_of_squares(ArrayRef array, int64_t n, Isa isa, int threads) {
  const KernelTable::SumOfSquares kernel = kernels_of(isa).sum_of_squares[static_cast<size_t>(array.type)];
  return sum_blocks(n, threads,
                    [&](int64_t first, int64_t block_n) { return kernel(at(array.data, array.type, first), block_n); });
}

}  // namespace tiered
