// AdamW, gradient accumulation, means and sums of squares on flat arrays in memory: the arithmetic of
// tiered/optim/kernels.py.
//
// Owns the choice of instruction set, the split into blocks over ThreadPool, and the loops (adam_loops.h).
//
// Invariants
// 1. Every element's result is a pure function of that element's inputs and its update's constants: bit-equal for any
//    position, alignment, split, thread count and instruction set. Each operation is rounded on its own (no FMA), in
//    the default floating-point environment, whatever the calling thread's rounding or flush-to-zero mode.
// 2. A sum of squares is folded in fp64 in one fixed order: blocks of kSumBlock elements from the start of the array,
//    element i of a block into lane i % kSumLanes, lanes as a binary tree, blocks in order.
// 3. NaN stays NaN; its sign and payload are not defined.
//
// Left to the caller: valid, non-overlapping arrays aligned to their element size; sorted, disjoint updates.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiered {

constexpr int64_t kSumBlock = 65536;
constexpr int kSumLanes = 16;

enum class DType : int { fp32 = 0, bf16 = 1, fp16 = 2 };
constexpr int kDTypes = 3;

enum class Isa { scalar, avx2, avx512 };

// One parameter's elements [start, stop) and the constants of its update; formulas in tiered/optim/kernels.py.
struct AdamUpdate {
  int64_t start;
  int64_t stop;
  float grad_scale;  // negative to maximize
  float decay;       // 1 - lr * weight_decay
  float lerp;        // exp_avg' = (lerp_from_grad ? grad : exp_avg) + lerp * (grad - exp_avg)
  bool lerp_from_grad;
  float beta2;
  float grad_sq_weight;  // 1 - beta2
  float bias2_sqrt;
  float eps;
  float step_size;  // lr / (1 - beta1 ** step)
};

// Equal-length arrays. `param_out` receives the new master in `out_type`, or is null.
struct AdamArrays {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  DType grad_type;
  void* param_out;
  DType out_type;
};

// Whether this processor (and this build) can run `isa`.
bool isa_supported(Isa isa);

// TIERED_ISA=scalar|avx2|avx512, or the widest one supported. Throws std::invalid_argument for any other value and for
// one this processor lacks. Read at each call; the bindings keep the first answer.
Isa isa_from_environment();

const char* isa_name(Isa isa);

// Applies `count` updates. Elements outside them are neither read nor written.
void adamw(const AdamUpdate* updates, size_t count, const AdamArrays& arrays, Isa isa, int threads);

// The first element of an array, and its type.
struct ArrayRef {
  void* data;
  DType type;
};

// dst[i] = src[i], or dst[i] + src[i] in fp32, rounded to nearest even; returns the sum of squares of the new dst.
// dst and src may be the same array. Throws std::bad_alloc (for one double per block) before anything is written.
double accumulate(ArrayRef dst, ArrayRef src, int64_t n, bool add, Isa isa, int threads);

// Arrays of one type whose mean is wanted: added up in the order given, the sum divided once, all in fp32.
struct MeanSources {
  const void* const* arrays;
  int count;  // at least 1
  DType type;
  int divisor;  // 1 .. 2^24, which fp32 holds exactly
};

// dst[i] = mean, or dst[i] + mean in fp32, rounded to nearest even; returns the sum of squares of the new dst.
// dst may be the same array as any of the sources. Throws std::bad_alloc as accumulate does.
double average(ArrayRef dst, const MeanSources& sources, int64_t n, bool add, Isa isa, int threads);

// Throws std::bad_alloc as accumulate does.
double sum_of_squares(ArrayRef array, int64_t n, Isa isa, int threads);

}  // namespace tiered
