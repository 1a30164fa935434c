// The operations that kernel.h is written in, for AVX2 (with FMA and F16C) and AVX-512.
#pragma once

#include <immintrin.h>

#include "vectors.h"

#if defined(_MSC_VER) && !defined(__clang__)
#define FOR_AVX2
#define FOR_AVX512
#else
#define FOR_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FOR_AVX512 __attribute__((target("avx512f,avx2,fma,f16c")))
#endif

namespace host_attention::avx2 {

#define TARGET FOR_AVX2
#define OPERATION TARGET HOST_ATTENTION_INLINE
using Vec = __m256;
constexpr int width = 8;
constexpr bool many_registers = false;

OPERATION Vec zeros() { return _mm256_setzero_ps(); }
OPERATION Vec load_float(const float *from) { return _mm256_loadu_ps(from); }
OPERATION void store_float(float *to, Vec v) { _mm256_storeu_ps(to, v); }
OPERATION Vec load(const Float32 *from) { return _mm256_loadu_ps(&from->value); }
OPERATION Vec load(const Float16 *from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
OPERATION Vec load(const BFloat16 *from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
template <class E>
OPERATION Vec load_part(const E *from, int n) {
    E whole[width] = {};
    std::memcpy(whole, from, n * sizeof(E));
    return load(whole);
}
OPERATION Vec spread(const float *from) { return _mm256_broadcast_ss(from); }
OPERATION Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
OPERATION Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
OPERATION Vec subtract(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
OPERATION Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
// Sums of the lanes of four vectors, with fewer operations than horizontal additions come to.
OPERATION Vec halves_of_two(Vec a, Vec b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e));
}
OPERATION __m128 sums_of_four(Vec a, Vec b, Vec c, Vec d) {
    const Vec ab = halves_of_two(a, b), cd = halves_of_two(c, d);
    const Vec four = _mm256_add_ps(
        _mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
    return _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
}
OPERATION float sum_lanes(Vec v) { return _mm_cvtss_f32(sums_of_four(v, v, v, v)); }
OPERATION float highest_lane(Vec v) {
    __m128 high = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    high = _mm_max_ps(high, _mm_movehl_ps(high, high));
    return _mm_cvtss_f32(_mm_max_ss(high, _mm_movehdup_ps(high)));
}
OPERATION Vec power_of_two(Vec x) {
    // With the operands in this order a NaN stays one.
    x = _mm256_max_ps(_mm256_set1_ps(lowest_power), x);
    const Vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec rest = _mm256_sub_ps(x, whole);
    Vec value = _mm256_set1_ps(power_series[7]);
    for (int k = 6; k >= 0; k--)
        value = _mm256_fmadd_ps(value, rest, _mm256_set1_ps(power_series[k]));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
// Lane sums of NG times R vectors go to NG rows of scores.
template <int NG, int R>
OPERATION void store_sums(const Vec *sums, float *to) {
    for (int i = 0; i < NG * R; i += 4) {
        const int last = NG * R - 1;
        const __m128 four = sums_of_four(
            sums[i], sums[std::min(i + 1, last)], sums[std::min(i + 2, last)],
            sums[std::min(i + 3, last)]);
        if constexpr (R == 4) {
            _mm_storeu_ps(to + i / R * score_stride, four);
        } else if constexpr (R == 2) {
            _mm_storel_pi(reinterpret_cast<__m64 *>(to + i / R * score_stride), four);
            if (i + 2 <= last)
                _mm_storeh_pi(reinterpret_cast<__m64 *>(to + (i / R + 1) * score_stride), four);
        } else {
            float each[4];
            _mm_storeu_ps(each, four);
            for (int j = 0; j < 4 && i + j <= last; j++)
                to[(i + j) / R * score_stride + (i + j) % R] = each[j];
        }
    }
}
OPERATION void prefetch(const char *from) { _mm_prefetch(from, _MM_HINT_T0); }
TARGET inline uint64_t read(const void *from, int64_t n_bytes) {
    const __m256i *at = static_cast<const __m256i *>(from);
    __m256i sum[8];
    for (auto &s : sum) s = _mm256_setzero_si256();
    for (int64_t i = 0; i + 8 <= n_bytes / int64_t(sizeof *at); i += 8)
        for (int j = 0; j < 8; j++)
            sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(at + i + j));
    for (int j = 1; j < 8; j++) sum[0] = _mm256_xor_si256(sum[0], sum[j]);
    uint64_t lane[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(lane), sum[0]);
    return lane[0] ^ lane[1] ^ lane[2] ^ lane[3];
}

#include "kernel.h"
#undef OPERATION
#undef TARGET

}  // namespace host_attention::avx2

namespace host_attention::avx512 {

#define TARGET FOR_AVX512
#define OPERATION TARGET HOST_ATTENTION_INLINE
using Vec = __m512;
constexpr int width = 16;
constexpr bool many_registers = true;

OPERATION Vec zeros() { return _mm512_setzero_ps(); }
OPERATION Vec load_float(const float *from) { return _mm512_loadu_ps(from); }
OPERATION void store_float(float *to, Vec v) { _mm512_storeu_ps(to, v); }
OPERATION Vec load(const Float32 *from) { return _mm512_loadu_ps(&from->value); }
OPERATION Vec load(const Float16 *from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
OPERATION Vec load(const BFloat16 *from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
template <class E>
OPERATION Vec load_part(const E *from, int n) {
    E whole[width] = {};
    std::memcpy(whole, from, n * sizeof(E));
    return load(whole);
}
OPERATION Vec spread(const float *from) { return _mm512_set1_ps(*from); }
OPERATION Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
OPERATION Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
OPERATION Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
OPERATION Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
OPERATION __m256 upper_half(Vec v) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
}
OPERATION __m256 halves_added(Vec v) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), upper_half(v));
}
OPERATION float sum_lanes(Vec v) { return avx2::sum_lanes(halves_added(v)); }
OPERATION float highest_lane(Vec v) {
    return avx2::highest_lane(_mm256_max_ps(_mm512_castps512_ps256(v), upper_half(v)));
}
OPERATION Vec power_of_two(Vec x) {
    x = _mm512_max_ps(_mm512_set1_ps(lowest_power), x);
    const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec rest = _mm512_sub_ps(x, whole);
    Vec value = _mm512_set1_ps(power_series[7]);
    for (int k = 6; k >= 0; k--)
        value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(power_series[k]));
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127));
    return _mm512_mul_ps(value, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}
template <int NG, int R>
OPERATION void store_sums(const Vec *sums, float *to) {
    __m256 halves[NG * R];
    for (int i = 0; i < NG * R; i++) halves[i] = halves_added(sums[i]);
    avx2::store_sums<NG, R>(halves, to);
}
OPERATION void prefetch(const char *from) { avx2::prefetch(from); }
TARGET inline uint64_t read(const void *from, int64_t n_bytes) {
    const __m512i *at = static_cast<const __m512i *>(from);
    __m512i sum[8];
    for (auto &s : sum) s = _mm512_setzero_si512();
    for (int64_t i = 0; i + 8 <= n_bytes / int64_t(sizeof *at); i += 8)
        for (int j = 0; j < 8; j++)
            sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(at + i + j));
    for (int j = 1; j < 8; j++) sum[0] = _mm512_xor_si512(sum[0], sum[j]);
    uint64_t lane[8], all = 0;
    _mm512_storeu_si512(lane, sum[0]);
    for (uint64_t l : lane) all ^= l;
    return all;
}

#include "kernel.h"
#undef OPERATION
#undef TARGET

}  // namespace host_attention::avx512
