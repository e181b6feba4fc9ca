// What kernels make of whole vectors (`vectors.h`): powers of two, hyperbolic tangents, maxima over lanes, numbers of 16
// bits, squares of words turned around. As there, no order of sums and no joining of operations is left to the compiler.

#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace {

template <size_t... I>
constexpr Ints counted(std::index_sequence<I...>) {
    return Ints{int32_t(I)...};
}
constexpr Ints LANE_NUMBERS = counted(std::make_index_sequence<WIDTH>());

#if defined(__AVX512F__)

inline Lanes rounded(Lanes x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#elif defined(__AVX2__) && defined(__FMA__)

inline Lanes rounded(Lanes x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#else

// Of what is less than 2^22: beyond 2^23 a float has no digits behind the point.
inline Lanes rounded(Lanes x) { return x + all_lanes(12582912.0f) - all_lanes(12582912.0f); }

#endif

// What several products use is loaded once: a compiler may think that loading it in each of them is as good.
template <class V>
inline V kept(V v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX2__)
    asm("" : "+x"(v));
#endif
    return v;
}

// Numbers of a 32-bit word of what is multiplied. float16 is widened first.
template <class T>
constexpr int PER_WORD = std::is_same_v<T, bfloat16> ? 2 : 1;

// ---- Powers of two, tangents

// y times 2 to the power of n, whole numbers; y and the result are no smaller than 2^-126.
inline Lanes times_power(Lanes y, Lanes n) {
#if defined(__AVX512F__)
    return _mm512_scalef_ps(y, n);
#else
    return (Lanes)((Ints)y + (__builtin_convertvector(n, Ints) << 23));
#endif
}

// (2^f - 1) / f for f in [-0.5, 0.5]
inline Lanes slope_of_power(Lanes f) {
    Lanes y = fused(all_lanes(1.535336194e-04f), f, all_lanes(1.339887440e-03f));
    y = fused(y, f, all_lanes(9.618437357e-03f));
    y = fused(y, f, all_lanes(5.550332471e-02f));
    y = fused(y, f, all_lanes(2.402264791e-01f));
    return fused(y, f, all_lanes(6.931472029e-01f));
}

// 2 to the power of each, up to 2^126; of what is below -100, nothing. To the last bit of a float, and of 0 exactly 1. Less
// than 2^-100 would be subnormal as soon as it is multiplied, and some processors take many times as long for such numbers.
inline Lanes power_of_two(Lanes x) {
    const Lanes n = rounded(x), f = x - n, y = fused(slope_of_power(f), f, all_lanes(1.0f));
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all_lanes(-100.0f), _CMP_NLT_UQ), y, n);
#else
    return (Lanes)((Ints)times_power(y, n) & ~(Ints)(x < all_lanes(-100.0f)));
#endif
}

// e^2|x| - 1 has all its digits where x is small, so the tangent has them too.
inline Lanes tangent(Lanes x) {
    const Ints sign = (Ints)x & INT32_MIN;
    Lanes doubled = (Lanes)((Ints)x & INT32_MAX) * all_lanes(2.88539008f);
    doubled = doubled > all_lanes(60.0f) ? all_lanes(60.0f) : doubled;
    const Lanes n = rounded(doubled), f = doubled - n, power = times_power(all_lanes(1.0f), n);
    const Lanes less_one = fused(slope_of_power(f) * f, power, power - all_lanes(1.0f));
    return (Lanes)((Ints)(less_one / (less_one + all_lanes(2.0f))) | sign);
}

// ---- Over lanes

template <int W, size_t... I>
inline Lanes swapped(Lanes v, std::index_sequence<I...>) {
    constexpr Ints other = {int32_t(I ^ W)...};
    return (Lanes)__builtin_shuffle((Ints)v, other);
}
// The greatest of all lanes, in each of them.
inline Lanes greatest(Lanes v) {
    constexpr auto lanes = std::make_index_sequence<WIDTH>();
    if constexpr (WIDTH > 8) v = larger(v, swapped<8 % WIDTH>(v, lanes));
    if constexpr (WIDTH > 4) v = larger(v, swapped<4 % WIDTH>(v, lanes));
    v = larger(v, swapped<2>(v, lanes));
    return larger(v, swapped<1>(v, lanes));
}
// Of WIDTH numbers side by side, halves first.
inline float sum_of_lanes(const float* v) {
    float sums[WIDTH];
    std::memcpy(sums, v, sizeof sums);
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

// ---- Loads and stores. `count` numbers are there; lanes behind them are zero, and no byte of theirs is touched.

inline Words load_words(const float* from) { return (Words)load_lanes(from); }
inline Words load_words(const bfloat16* from) { return load_words(reinterpret_cast<const uint32_t*>(from)); }
inline Words load_words(const float16* from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Words)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Lanes v;
    for (int i = 0; i < WIDTH; i++) v[i] = float(from[i]);
    return (Words)v;
#endif
}
template <class T>
inline Words load_words(const T* from, int count) {
    if (count >= WIDTH * PER_WORD<T>) return load_words(from);
#if defined(__AVX512BW__)
    if constexpr (std::is_same_v<T, float>) return _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), from);
    if constexpr (std::is_same_v<T, bfloat16>) return _mm512_maskz_loadu_epi16(__mmask32((1u << count) - 1), from);
#endif
    T numbers[WIDTH * PER_WORD<T>] = {};
    std::memcpy(static_cast<void*>(numbers), from, count * sizeof(T));
    return load_words(numbers);
}

// WIDTH words of numbers as float32: one vector, or two, of the even and of the odd numbers.
template <class T>
inline void widen(Words words, Lanes* v) {
    if constexpr (PER_WORD<T> == 2) {
        v[0] = as_lanes(low_halves(words));
        v[1] = as_lanes(high_halves(words));
    } else {
        v[0] = as_lanes(words);
    }
}

// The other way round than `widen`, as T.
template <class T>
inline void narrow(const Lanes* v, T* to, int count) {
    T numbers[WIDTH * PER_WORD<T>];
    if constexpr (PER_WORD<T> == 2) {
        const Words low = (Words)rounded_to_bfloat16(v[0]), high = (Words)rounded_to_bfloat16(v[1]);
        const Ints both = (Ints)high_halves(high) | (((Ints)low >> 16) & 0xFFFF);
        std::memcpy(static_cast<void*>(numbers), &both, sizeof both);
    } else if constexpr (std::is_same_v<T, float>) {
        std::memcpy(numbers, v, sizeof numbers);
    } else {
        for (int i = 0; i < WIDTH; i++) from_float(v[0][i], numbers + i);
    }
    if (count >= WIDTH * PER_WORD<T>)
        std::memcpy(static_cast<void*>(to), numbers, sizeof numbers);
    else
        std::memcpy(static_cast<void*>(to), numbers, count * sizeof(T));
}

// ---- Rows become columns

typedef int32_t Quarter __attribute__((vector_size(16)));  // four words of a row

inline Quarter load_quarter(const float* from) {
    Quarter words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
inline Quarter load_quarter(const bfloat16* from) { return load_quarter(reinterpret_cast<const float*>(from)); }
inline Quarter load_quarter(const float16* from) {
#if defined(__F16C__)
    return (Quarter)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    const float words[4] = {from[0], from[1], from[2], from[3]};
    return load_quarter(words);
#endif
}
template <class T>
inline Quarter load_quarter(const T* from, int count) {
    T numbers[4 * PER_WORD<T>] = {};
    std::memcpy(static_cast<void*>(numbers), from, count * sizeof(T));
    return load_quarter(numbers);
}

// Of each four words of a and of b: the first two, or the last two, in turns; and the first, or the second, pairs.
#if defined(__AVX512F__)
inline Words first_words(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
inline Words last_words(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
inline Words first_pairs(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
inline Words last_pairs(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
#elif defined(__AVX2__) && defined(__FMA__)
inline Words first_words(Words a, Words b) { return _mm256_unpacklo_epi32(a, b); }
inline Words last_words(Words a, Words b) { return _mm256_unpackhi_epi32(a, b); }
inline Words first_pairs(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }
inline Words last_pairs(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
#else
inline Words first_words(Words a, Words b) { return __builtin_shuffle(a, b, Words{0, 4, 1, 5}); }
inline Words last_words(Words a, Words b) { return __builtin_shuffle(a, b, Words{2, 6, 3, 7}); }
inline Words first_pairs(Words a, Words b) { return __builtin_shuffle(a, b, Words{0, 1, 4, 5}); }
inline Words last_pairs(Words a, Words b) { return __builtin_shuffle(a, b, Words{2, 3, 6, 7}); }
#endif

// Four words of WIDTH rows each: v[i] has the word i of each row.
template <class Load>
inline void load_turned(Load row, Words* v) {
    Words rows[4], pairs[4];
    for (int i = 0; i < 4; i++) {  // the quarter of a vector that row 4 q + i fills is q
#if defined(__AVX512F__)
        rows[i] = _mm512_castsi128_si512((__m128i)row(i));
        rows[i] = _mm512_mask_broadcast_i32x4(rows[i], 0x00F0, (__m128i)row(4 + i));
        rows[i] = _mm512_mask_broadcast_i32x4(rows[i], 0x0F00, (__m128i)row(8 + i));
        rows[i] = _mm512_mask_broadcast_i32x4(rows[i], 0xF000, (__m128i)row(12 + i));
#elif defined(__AVX2__) && defined(__FMA__)
        rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)row(i)), (__m128i)row(4 + i), 1);
#else
        rows[i] = (Words)row(i);
#endif
    }
    for (int i = 0; i < 4; i += 2) {
        pairs[i] = first_words(rows[i], rows[i + 1]);
        pairs[i + 1] = last_words(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        v[2 * i] = first_pairs(pairs[i], pairs[i + 2]);
        v[2 * i + 1] = last_pairs(pairs[i], pairs[i + 2]);
    }
}

}  // namespace
