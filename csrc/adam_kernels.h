// The seam between adam.cpp (dispatch, threads) and the loops of one instruction set.
//
// A table holds one function per element-type combination. Every table computes the same bits (adam.h, invariants 1,
// 2).
#pragma once

#include "adam.h"

namespace tiered {

// The arrays of AdamArrays, moved to the first element of a block.
struct AdamBlock {
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  const void* grad;
  void* param_out;
};

// MeanSources with the division prepared: x / 2^k and x * 2^-k are the same float, and the product is cheaper.
struct Mean {
  const void* const* arrays;
  int count;
  float divisor;  // or its reciprocal
  bool reciprocal;
};

struct KernelTable {
  // [grad type][out type, kDTypes for no output]; n elements of one update
  using Adamw = void (*)(const AdamUpdate&, const AdamBlock&, int64_t n);
  Adamw adamw[kDTypes][kDTypes + 1];

  // [dst type][src type][add]; n <= kSumBlock; returns the block's folded sum of squares
  using Accumulate = double (*)(void* dst, const void* src, int64_t n);
  Accumulate accumulate[kDTypes][kDTypes][2];

  // [dst type][source type][add]; elements [first, first + n) of the sources, as above otherwise
  using Average = double (*)(void* dst, const Mean& mean, int64_t first, int64_t n);
  Average average[kDTypes][kDTypes][2];

  using SumOfSquares = double (*)(const void* array, int64_t n);
  SumOfSquares sum_of_squares[kDTypes];
};

extern const KernelTable scalar_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
#endif

}  // namespace tiered
