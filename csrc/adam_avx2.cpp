// The AVX2 + F16C kernels: eight floats a vector. See adam_loops.h for the contract of a vector type.
#if defined(__x86_64__)

#include <immintrin.h>

#define TIERED_TARGET __attribute__((target("avx2,f16c")))
#include "adam_loops.h"

namespace tiered {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int width = 8;
  struct Lanes {
    __m256d quad[4] = {};  // quad[k] holds lanes 4k .. 4k + 3
  };

  TIERED_INLINE static F set1(float x) { return _mm256_set1_ps(x); }
  TIERED_INLINE static F add(F a, F b) { return _mm256_add_ps(a, b); }
  TIERED_INLINE static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  TIERED_INLINE static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  TIERED_INLINE static F div(F a, F b) { return _mm256_div_ps(a, b); }
  TIERED_INLINE static F sqrt(F a) { return _mm256_sqrt_ps(a); }

  TIERED_INLINE static F widen_bf16(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  TIERED_INLINE static __m128i narrow_bf16(F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i top = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    const __m256i half_ulp = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half_ulp), 16);
    const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x0040));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i word = _mm256_blendv_epi8(rounded, quiet, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(word), _mm256_extracti128_si256(word, 1));
  }

  TIERED_INLINE static F load(Fp32, const float* p) { return _mm256_loadu_ps(p); }
  TIERED_INLINE static F load(Bf16, const uint16_t* p) { return widen_bf16(load_halves(p)); }
  TIERED_INLINE static F load(Fp16, const uint16_t* p) { return _mm256_cvtph_ps(load_halves(p)); }

  TIERED_INLINE static F store(Fp32, float* p, F x) {
    _mm256_storeu_ps(p, x);
    return x;
  }
  TIERED_INLINE static F store(Bf16, uint16_t* p, F x) {
    const __m128i halves = narrow_bf16(x);
    store_halves(p, halves);
    return widen_bf16(halves);
  }
  TIERED_INLINE static F store(Fp16, uint16_t* p, F x) {
    const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    store_halves(p, halves);
    return _mm256_cvtph_ps(halves);
  }

  TIERED_INLINE static void add_squares(Lanes& lanes, F x, int first_lane) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    __m256d* quad = lanes.quad + first_lane / 4;
    quad[0] = _mm256_add_pd(quad[0], _mm256_mul_pd(low, low));
    quad[1] = _mm256_add_pd(quad[1], _mm256_mul_pd(high, high));
  }
  TIERED_INLINE static void spill(const Lanes& lanes, double* out) {
    for (int k = 0; k < 4; ++k) _mm256_storeu_pd(out + 4 * k, lanes.quad[k]);
  }

 private:
  TIERED_INLINE static __m128i load_halves(const uint16_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  TIERED_INLINE static void store_halves(uint16_t* p, __m128i halves) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), halves);
  }
};

}  // namespace

const KernelTable avx2_kernels = TIERED_KERNEL_TABLE(Avx2);

}  // namespace tiered

#endif
