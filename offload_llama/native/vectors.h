// The operations that kernel.h is written in, for each instruction set. Each namespace includes the
// kernel; only `functions` is used from outside.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "host_attention.h"

namespace host_attention {

struct Float32 {
    float value;
};
struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

// The Taylor series of 2^x; over [-1/2, 1/2] what it leaves out is under 6e-9 of the value.
constexpr float power_series[8] = {1.0f,           0.6931471806f,  0.2402265070f,   0.0555041087f,
                                   0.00961812911f, 0.00133335581f, 0.000154035304f, 1.52527338e-5f};
// Weights below 2^-126 would not be normal numbers; beside the highest, which is 1, they vanish.
constexpr float lowest_power = -126.0f;

}  // namespace host_attention

// Plain C++, for every other processor. Eight lanes, so that a compiler may turn them into whatever
// vectors its target always has (SSE2, NEON).
namespace host_attention::portable {

#define TARGET
constexpr int width = 8;
constexpr bool many_registers = false;

struct Vec {
    float lane[width];
};

#define LANES for (int i = 0; i < width; i++)

HOST_ATTENTION_INLINE Vec zeros() { return Vec{}; }
HOST_ATTENTION_INLINE Vec load_float(const float *from) {
    Vec v;
    std::memcpy(v.lane, from, sizeof v.lane);
    return v;
}
HOST_ATTENTION_INLINE void store_float(float *to, const Vec &v) {
    std::memcpy(to, v.lane, sizeof v.lane);
}
HOST_ATTENTION_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
HOST_ATTENTION_INLINE float widen(Float32 x) { return x.value; }
HOST_ATTENTION_INLINE float widen(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
// Exponent and mantissa move to float32's places and 2^112 corrects the bias, which serves
// subnormal numbers too; infinities and NaNs get the rest of their exponent.
HOST_ATTENTION_INLINE float widen(Float16 x) {
    const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
    const float finite = as_float(magnitude) * as_float((127u + 112u) << 23);
    uint32_t bits;
    std::memcpy(&bits, &finite, sizeof bits);
    if (magnitude >= 0x0f800000u) bits = magnitude | 0x7f800000u;
    return as_float(bits | sign);
}
template <class E>
HOST_ATTENTION_INLINE Vec load(const E *from) {
    Vec v;
    LANES v.lane[i] = widen(from[i]);
    return v;
}
template <class E>
HOST_ATTENTION_INLINE Vec load_part(const E *from, int n) {
    Vec v{};
    for (int i = 0; i < n; i++) v.lane[i] = widen(from[i]);
    return v;
}
HOST_ATTENTION_INLINE Vec spread(const float *from) {
    Vec v;
    LANES v.lane[i] = *from;
    return v;
}
HOST_ATTENTION_INLINE Vec multiply_add(const Vec &a, const Vec &b, const Vec &c) {
    Vec v;
    LANES v.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
    return v;
}
HOST_ATTENTION_INLINE Vec add(const Vec &a, const Vec &b) {
    Vec v;
    LANES v.lane[i] = a.lane[i] + b.lane[i];
    return v;
}
HOST_ATTENTION_INLINE Vec subtract(const Vec &a, const Vec &b) {
    Vec v;
    LANES v.lane[i] = a.lane[i] - b.lane[i];
    return v;
}
HOST_ATTENTION_INLINE Vec maximum(const Vec &a, const Vec &b) {
    Vec v;
    LANES v.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return v;
}
HOST_ATTENTION_INLINE float highest_lane(const Vec &v) {
    float high = v.lane[0];
    LANES high = std::max(high, v.lane[i]);
    return high;
}
HOST_ATTENTION_INLINE float sum_lanes(const Vec &v) {
    float sum = 0;
    LANES sum += v.lane[i];
    return sum;
}
HOST_ATTENTION_INLINE Vec power_of_two(const Vec &x) {
    Vec v;
    LANES {
        // A NaN stays one: it is not below the lowest power.
        const float power = x.lane[i] < lowest_power ? lowest_power : x.lane[i];
        const float whole = std::nearbyint(power);
        const float rest = power - whole;
        float value = power_series[7];
        for (int k = 6; k >= 0; k--) value = value * rest + power_series[k];
        const int32_t exponent = whole >= lowest_power ? int32_t(whole) + 127 : 127;
        v.lane[i] = value * as_float(uint32_t(exponent) << 23);
    }
    return v;
}
template <int NG, int R>
HOST_ATTENTION_INLINE void store_sums(const Vec *sums, float *to) {
    for (int i = 0; i < NG * R; i++) to[i / R * score_stride + i % R] = sum_lanes(sums[i]);
}
HOST_ATTENTION_INLINE void prefetch(const char *from) {
#if defined(__GNUC__)
    __builtin_prefetch(from);
#else
    (void)from;
#endif
}
inline uint64_t read(const void *from, int64_t n_bytes) {
    uint64_t sum[8] = {}, word[8];
    for (int64_t i = 0; i + int64_t(sizeof word) <= n_bytes; i += sizeof word) {
        std::memcpy(word, static_cast<const char *>(from) + i, sizeof word);
        LANES sum[i] ^= word[i];
    }
    uint64_t all = 0;
    LANES all ^= sum[i];
    return all;
}
#undef LANES

#include "kernel.h"
#undef TARGET

}  // namespace host_attention::portable
