// Numbers of any kind as vectors, and functions of vectors. Lanes are independent: what comes out of one is the same
// whatever the others hold, and in whichever lane it lies. Sums and products come in one explicit order.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace {

typedef uint32_t Unsigned __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Shorts __attribute__((vector_size(2 * WIDTH)));

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// -- numbers of another kind -------------------------------------------------------------------------------------------

inline Lanes load_lanes(const bfloat16* from) {
    Shorts narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    return same_bits<Lanes>(__builtin_convertvector(narrow, Unsigned) << 16);
}
inline Lanes load_lanes(const float16* from) {
    float wide[WIDTH];
    for (int i = 0; i < WIDTH; i++) wide[i] = to_float(from[i]);
    return load_lanes(wide);
}
inline Unsigned bfloat16_bits(Lanes v) { return same_bits<Unsigned>(rounded_to_bfloat16(v)) & 0xFFFF0000; }
inline void store_lanes(Lanes v, bfloat16* to) {
    const Shorts narrow = __builtin_convertvector(bfloat16_bits(v) >> 16, Shorts);
    std::memcpy(static_cast<void*>(to), &narrow, sizeof narrow);
}
inline void store_lanes(Lanes v, float16* to) {
    float wide[WIDTH];
    store_lanes(v, wide);
    for (int i = 0; i < WIDTH; i++) from_float(wide[i], to + i);
}

// The first `count` numbers, zeros behind them.
template <class T>
inline Lanes load_some(const T* from, int count) {
    if (count >= WIDTH) return load_lanes(from);
    T some[WIDTH] = {};
    std::memcpy(static_cast<void*>(some), from, sizeof(T) * count);
    return load_lanes(some);
}
template <class T>
inline void store_some(Lanes v, T* to, int count) {
    if (count >= WIDTH) return store_lanes(v, to);
    T some[WIDTH];
    store_lanes(v, some);
    std::memcpy(static_cast<void*>(to), some, sizeof(T) * count);
}

// What is left of each after it has been kept as a T.
template <class T>
inline Lanes rounded(Lanes v) {
    if constexpr (std::is_same_v<T, float>) return v;
    if constexpr (std::is_same_v<T, bfloat16>) return same_bits<Lanes>(bfloat16_bits(v));
    T some[WIDTH];
    store_lanes(v, some);
    return load_lanes(some);
}

// -- functions ---------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX2__) && defined(__FMA__)
inline Lanes smaller(Lanes a, Lanes b) { return _mm256_min_ps(a, b); }
#else
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
#endif

// 2 to the power of `high` + `low`, where `low` is far smaller: to about the last bit of a float. Of what is below -100
// nothing, for less would be subnormal as soon as it is multiplied; high is at most 126.
inline Lanes power_of_two(Lanes high, Lanes low) {
    const Lanes lowest = all_lanes(-100.0f), shift = all_lanes(12582912.0f);  // 1.5 * 2^23
    const Ints is_nothing = high < lowest;
    high = larger(lowest, high);
    const Lanes shifted = high + shift;  // its last bits are the nearest whole number
    const Lanes f = (high - (shifted - shift)) + low;
    Lanes y = fused(f, all_lanes(1.54035304e-4f), all_lanes(1.33335581e-3f));
    y = fused(y, f, all_lanes(9.61812911e-3f));
    y = fused(y, f, all_lanes(5.55041087e-2f));
    y = fused(y, f, all_lanes(0.240226507f));
    y = fused(y, f, all_lanes(0.693147181f));
    y = fused(y, f, all_lanes(1.0f));
    const Ints bits = (same_bits<Ints>(y) + (same_bits<Ints>(shifted) << 23)) & ~is_nothing;
    return same_bits<Lanes>(bits);
}

constexpr float LOG2_E = 1.44269504f, LOG2_E_REST = 1.92596299e-8f;

// Of more than 80 that of 80.
inline Lanes exponential(Lanes x) {
    x = larger(all_lanes(-80.0f), smaller(all_lanes(80.0f), x));
    const Lanes high = x * LOG2_E;
    return power_of_two(high, fused(x, all_lanes(LOG2_E_REST), fused(x, all_lanes(LOG2_E), -high)));
}

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

inline Lanes silu(Lanes x) { return x / (1.0f + exponential(-x)); }

// log(1 + exp(x)), as max(x, 0) + log(1 + y) with y = exp(-|x|), by the series of atanh(y / (2 + y)).
inline Lanes softplus(Lanes x) {
    const Lanes y = exponential(smaller(x, -x));
    const Lanes s = y / (2.0f + y), square = s * s;
    Lanes sum = all_lanes(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) sum = fused(sum, square, all_lanes(1.0f / float(odd)));
    return fused(s + s, sum, larger(Lanes{}, x));
}

}  // namespace
