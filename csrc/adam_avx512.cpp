// The AVX-512F kernels: sixteen floats a vector. See adam_loops.h for the contract of a vector type.
//
// bf16 is converted with integer operations: the bf16 instructions of newer processors flush denormals to zero.
#if defined(__x86_64__)

// GCC 12's own avx512fintrin.h trips this warning wherever it is inlined (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#define TIERED_TARGET __attribute__((target("avx512f")))
#include "adam_loops.h"

namespace tiered {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int width = 16;
  struct Lanes {
    __m512d low = {};   // lanes 0 .. 7
    __m512d high = {};  // lanes 8 .. 15
  };

  TIERED_INLINE static F set1(float x) { return _mm512_set1_ps(x); }
  TIERED_INLINE static F add(F a, F b) { return _mm512_add_ps(a, b); }
  TIERED_INLINE static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  TIERED_INLINE static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  TIERED_INLINE static F div(F a, F b) { return _mm512_div_ps(a, b); }
  TIERED_INLINE static F sqrt(F a) { return _mm512_sqrt_ps(a); }

  TIERED_INLINE static F widen_bf16(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  TIERED_INLINE static __m256i narrow_bf16(F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i top = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
    const __m512i half_ulp = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half_ulp), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, top, _mm512_set1_epi32(0x0040)));
  }

  TIERED_INLINE static F load(Fp32, const float* p) { return _mm512_loadu_ps(p); }
  TIERED_INLINE static F load(Bf16, const uint16_t* p) { return widen_bf16(load_halves(p)); }
  TIERED_INLINE static F load(Fp16, const uint16_t* p) { return _mm512_cvtph_ps(load_halves(p)); }

  TIERED_INLINE static F store(Fp32, float* p, F x) {
    _mm512_storeu_ps(p, x);
    return x;
  }
  TIERED_INLINE static F store(Bf16, uint16_t* p, F x) {
    const __m256i halves = narrow_bf16(x);
    store_halves(p, halves);
    return widen_bf16(halves);
  }
  TIERED_INLINE static F store(Fp16, uint16_t* p, F x) {
    const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store_halves(p, halves);
    return _mm512_cvtph_ps(halves);
  }

  TIERED_INLINE static void add_squares(Lanes& lanes, F x, int) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
    lanes.low = _mm512_add_pd(lanes.low, _mm512_mul_pd(low, low));
    lanes.high = _mm512_add_pd(lanes.high, _mm512_mul_pd(high, high));
  }
  TIERED_INLINE static void spill(const Lanes& lanes, double* out) {
    _mm512_storeu_pd(out, lanes.low);
    _mm512_storeu_pd(out + 8, lanes.high);
  }

 private:
  TIERED_INLINE static __m256i load_halves(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  TIERED_INLINE static void store_halves(uint16_t* p, __m256i halves) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), halves);
  }
};

}  // namespace

const KernelTable avx512_kernels = TIERED_KERNEL_TABLE(Avx512);

}  // namespace tiered

#endif
