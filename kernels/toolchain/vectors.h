// The widest vectors of this processor, whose lanes are independent of one another: sums over lanes are not here. Every
// operation is one instruction, so that a sum comes out the same wherever it is written; a compiler may not join or
// split them.

#pragma once

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace {

#if defined(__AVX512F__)

#if defined(__AVX512BF16__)
constexpr char VECTORS_NAME[] = "AVX-512 with products of bfloat16";
#else
constexpr char VECTORS_NAME[] = "AVX-512";
#endif
constexpr int WIDTH = 16, REGISTERS = 32;
typedef __m512 Lanes;
typedef __m512i Words;
inline Lanes load_lanes(const float* from) { return _mm512_loadu_ps(from); }
inline void store_lanes(Lanes v, float* to) { _mm512_storeu_ps(to, v); }
inline Words load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline Words all_words(uint32_t word) { return _mm512_set1_epi32(int(word)); }
inline Lanes as_lanes(Words v) { return _mm512_castsi512_ps(v); }
inline Words low_halves(Words v) { return _mm512_slli_epi32(v, 16); }
inline Words high_halves(Words v) { return _mm512_and_si512(v, _mm512_set1_epi32(int(0xFFFF0000u))); }
inline Lanes fused(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }

#elif defined(__AVX2__) && defined(__FMA__)

constexpr char VECTORS_NAME[] = "AVX2";
constexpr int WIDTH = 8, REGISTERS = 16;
typedef __m256 Lanes;
typedef __m256i Words;
inline Lanes load_lanes(const float* from) { return _mm256_loadu_ps(from); }
inline void store_lanes(Lanes v, float* to) { _mm256_storeu_ps(to, v); }
inline Words load_words(const uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Words all_words(uint32_t word) { return _mm256_set1_epi32(int(word)); }
inline Lanes as_lanes(Words v) { return _mm256_castsi256_ps(v); }
inline Words low_halves(Words v) { return _mm256_slli_epi32(v, 16); }
inline Words high_halves(Words v) { return _mm256_and_si256(v, _mm256_set1_epi32(int(0xFFFF0000u))); }
// As it stands: compilers write sums into other registers than they come from, and then have too few of sixteen.
inline Lanes fused(Lanes a, Lanes b, Lanes sum) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
}

#else

constexpr char VECTORS_NAME[] = "of four numbers";
constexpr int WIDTH = 4, REGISTERS = 16;
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
inline Lanes load_lanes(const float* from) {
    Lanes v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store_lanes(Lanes v, float* to) { std::memcpy(to, &v, sizeof v); }
inline Words load_words(const uint32_t* from) {
    Words v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline Words all_words(uint32_t word) { return Words{} + word; }
inline Lanes as_lanes(Words v) {
    Lanes result;
    std::memcpy(&result, &v, sizeof v);
    return result;
}
inline Words low_halves(Words v) { return v << 16; }
inline Words high_halves(Words v) { return v & 0xFFFF0000u; }
inline Lanes fused(Lanes a, Lanes b, Lanes sum) { return a * b + sum; }

#endif

inline void prefetch(const void* at) { __builtin_prefetch(at); }
// Into the second cache, for what is needed too late for the first.
inline void prefetch_far(const void* at) { __builtin_prefetch(at, 0, 2); }

typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits32 __attribute__((vector_size(4 * WIDTH)));

inline Lanes floats_of(Ints v) { return __builtin_convertvector(v, Lanes); }

inline Lanes all_lanes(float x) { return x - Lanes{}; }  // which keeps the sign of zero

// Of NaN and a number, the latter argument.
#if defined(__AVX512F__)
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
#elif defined(__AVX2__) && defined(__FMA__)
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
#else
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
#endif

// In the upper half of each word, what a bfloat16 has: to the nearest, ties to even. The lower half is anything.
inline Ints nearest_bfloat16(Lanes v) {
    const Ints bits = (Ints)v;
    return bits + (0x7FFF + ((bits >> 16) & 1));
}
// The same of any number: NaN stays NaN.
inline Ints rounded_to_bfloat16(Lanes v) {
    return ((Ints)v & INT32_MAX) > 0x7F800000 ? Ints{} + 0x7FC00000 : nearest_bfloat16(v);
}

// sum + a * b for each lane, of one float32, or of two bfloat16 one after the other.
template <class T>
inline Lanes add_product(Lanes sum, Words a, Words b);

template <>
inline Lanes add_product<float>(Lanes sum, Words a, Words b) {
    return fused(as_lanes(a), as_lanes(b), sum);
}

template <>
inline Lanes add_product<bfloat16>(Lanes sum, Words a, Words b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    sum = fused(as_lanes(low_halves(a)), as_lanes(low_halves(b)), sum);
    return fused(as_lanes(high_halves(a)), as_lanes(high_halves(b)), sum);
#endif
}

// Whether pairs are multiplied one half after the other, which makes float32 of each.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool IS_SPLIT = false;
#else
template <class T>
constexpr bool IS_SPLIT = sizeof(T) == 2;
#endif

// Of each word of two numbers that are split, the first or second one as float32; other words as they are.
template <class T>
inline Words met_words(Words words, int half) {
    if (!IS_SPLIT<T>) return words;
    return half ? high_halves(words) : low_halves(words);
}

}  // namespace
