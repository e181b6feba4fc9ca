// Weights in fewer bits, decoded to the words of a panel (cpu_products.cpp) just before rows meet them: what is read
// from memory is as small as what is stored, and products and their order are those of plain weights.
//
//     codes    [panels][pairs of columns][64] bytes, two codes of four bits each, the even column's below
//              [panels][pairs of columns][2][64] bytes, one code each
//     scale    [panels][groups of columns][64], in the kind of numbers that the files have; zero beside it, a byte each
//     factor   [panels][64] float32: what scales are multiplied with, or divided by
//
// A number is (code - zero) * scale, in float32, rounded once: as workers/models/unpacked.py computes it.

#pragma once

#include <algorithm>

#include "numbers.h"
#include "vectors.h"

namespace {

enum CodeKind { INT4 = 0, E2M1 = 1, INT8 = 2, E4M3 = 3, UINT8 = 4 };
enum ScaleKind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3, POWER = 4 };

struct Codes {
    const uint8_t* codes;  // null: the weight is not packed in fewer bits
    const void* scale;
    const uint8_t* zero;   // null: none, but `middle`
    const float* factor;   // null: none
    int64_t groups;        // of columns, in each panel
    int32_t code_kind, scale_kind;
    int32_t columns;       // of a group; even
    int32_t offset;        // how many columns of the first group lie before the first; even
    float middle;          // is subtracted from every code, too
    int32_t divides;       // by the factor
};

inline int scale_bytes(int kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 || kind == FLOAT16 ? 2 : 1; }
inline bool is_of_four_bits(int kind) { return kind == INT4 || kind == E2M1; }

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float e4m3(uint8_t code) {  // its bits in those of a float16, whose exponents mean 256 times less
    const uint16_t bits = uint16_t((code & 0x80) << 8 | (code & 0x7F) << 7);
    float16 value;
    std::memcpy(&value, &bits, 2);
    return (code & 0x7F) == 0x7F ? float_of(0x7FC00000) : float(value) * 256.0f;
}

constexpr float E2M1_VALUES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr float INT4_VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Numbers of codes for the lanes of one vector, of an even column and the odd one after it.
#if defined(__AVX512F__) && defined(__AVX512BW__)

inline Lanes looked_up(const float* table, Words code) {
    return _mm512_permutexvar_ps(code, _mm512_loadu_ps(table));  // by the lowest four bits of each
}
inline Words bytes_at(const uint8_t* at) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

inline Lanes e4m3_lanes(const uint8_t* at) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7F)), 7);
    return _mm512_cvtph_ps(_mm256_or_si256(sign, rest)) * all_lanes(256.0f);
}

template <int KIND>
inline Lanes byte_numbers(const uint8_t* at) {
    if (KIND == E4M3) return e4m3_lanes(at);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return _mm512_cvtepi32_ps(KIND == INT8 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

template <int KIND>
inline void pair_numbers(const uint8_t* at, int v, Lanes& even, Lanes& odd) {
    if constexpr (KIND == INT4 || KIND == E2M1) {
        const float* table = KIND == INT4 ? INT4_VALUES : E2M1_VALUES;
        const Words code = bytes_at(at + v * WIDTH);
        even = looked_up(table, code);
        odd = looked_up(table, _mm512_srli_epi32(code, 4));
    } else {
        even = byte_numbers<KIND>(at + v * WIDTH);
        odd = byte_numbers<KIND>(at + 64 + v * WIDTH);
    }
}

#else

inline Lanes e4m3_lanes(const uint8_t* at) {
    float numbers[WIDTH];
    for (int n = 0; n < WIDTH; n++) numbers[n] = e4m3(at[n]);
    return load_lanes(numbers);
}

template <int KIND>
inline float byte_number(uint8_t code) {
    if (KIND == INT8) return float(int8_t(code));
    return KIND == UINT8 ? float(code) : e4m3(code);
}

template <int KIND>
inline void pair_numbers(const uint8_t* at, int v, Lanes& even, Lanes& odd) {
    float first[WIDTH], second[WIDTH];
    if constexpr (KIND == INT4 || KIND == E2M1) {
        const float* table = KIND == INT4 ? INT4_VALUES : E2M1_VALUES;
        for (int n = 0; n < WIDTH; n++) {
            first[n] = table[at[v * WIDTH + n] & 15];
            second[n] = table[at[v * WIDTH + n] >> 4];
        }
    } else {
        for (int n = 0; n < WIDTH; n++) {
            first[n] = byte_number<KIND>(at[v * WIDTH + n]);
            second[n] = byte_number<KIND>(at[64 + v * WIDTH + n]);
        }
    }
    even = load_lanes(first);
    odd = load_lanes(second);
}

#endif

inline float power_of_two(uint8_t power) {  // the smallest is subnormal
    return power ? float_of(uint32_t(power) << 23) : float_of(1u << 22);
}

// 64 numbers from the n-th on.
inline void load_scales(const void* at, int kind, int64_t n, float* to) {
    switch (kind) {
        case FLOAT32: std::memcpy(to, static_cast<const float*>(at) + n, 64 * sizeof(float)); return;
        case BFLOAT16:
            for (int i = 0; i < 64; i += LANES) store(load(static_cast<const bfloat16*>(at) + n + i), to + i);
            return;
        case FLOAT16:
            for (int i = 0; i < 64; i += LANES) store(load(static_cast<const float16*>(at) + n + i), to + i);
            return;
        case FLOAT8:
            for (int i = 0; i < 64; i += WIDTH) store_lanes(e4m3_lanes(static_cast<const uint8_t*>(at) + n + i), to + i);
            return;
        default:
            for (int i = 0; i < 64; i++) to[i] = power_of_two(static_cast<const uint8_t*>(at)[n + i]);
    }
}

// Two numbers of each lane as words of a panel: two steps of float32, or one of bfloat16.
inline void store_pair(Lanes even, Lanes odd, uint32_t* to, float*) {
    store_lanes(even, reinterpret_cast<float*>(to));
    store_lanes(odd, reinterpret_cast<float*>(to + 64));
}

inline void store_pair(Lanes even, Lanes odd, uint32_t* to, bfloat16*) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const Words both = (Words)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(TURNS), both));
#else
    const Ints low = rounded_to_bfloat16(even), high = rounded_to_bfloat16(odd);
    const Ints both = (high & int32_t(0xFFFF0000)) | ((low >> 16) & 0xFFFF);
    std::memcpy(to, &both, sizeof both);
#endif
}

// Pairs [from, to) of the columns of a panel, as the words of 64 outputs.
template <class T, int KIND>
void decode_pairs(const Codes& a, int64_t pairs, int64_t panel, int64_t from, int64_t to, uint32_t* words) {
    constexpr int VECTORS = 64 / WIDTH, PAIR_WORDS = sizeof(T) == 4 ? 128 : 64;
    const int pair_bytes = is_of_four_bits(KIND) ? 64 : 128;
    const uint8_t* codes = a.codes + (panel * pairs + from) * pair_bytes;
    const int64_t first_scale = panel * a.groups * 64;
    alignas(64) float scale[64], zero[64];
    for (int64_t pair = from; pair < to;) {
        const int64_t group = (2 * pair + a.offset) / a.columns;
        const int64_t end = std::min(to, ((group + 1) * a.columns - a.offset) / 2);
        // What all of a group have in common.
        const int64_t at = first_scale + group * 64;
        load_scales(a.scale, a.scale_kind, at, scale);
        for (int n = 0; a.factor && n < 64; n++)
            scale[n] = a.divides ? scale[n] / a.factor[panel * 64 + n] : scale[n] * a.factor[panel * 64 + n];
        for (int n = 0; n < 64; n++) zero[n] = (a.zero ? float(a.zero[at + n]) : 0.0f) + a.middle;
        Lanes scales[VECTORS], zeros[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            scales[v] = load_lanes(scale + v * WIDTH);
            zeros[v] = load_lanes(zero + v * WIDTH);
        }
        for (; pair < end; pair++, codes += pair_bytes, words += PAIR_WORDS) {
            prefetch_far(codes + 2048);
            for (int v = 0; v < VECTORS; v++) {
                Lanes even, odd;
                pair_numbers<KIND>(codes, v, even, odd);
                even = (even - zeros[v]) * scales[v];
                odd = (odd - zeros[v]) * scales[v];
                store_pair(even, odd, words + v * WIDTH, static_cast<T*>(nullptr));
            }
        }
    }
}

template <class T>
void decode(const Codes& a, int64_t pairs, int64_t panel, int64_t from, int64_t to, uint32_t* words) {
    switch (a.code_kind) {
        case INT4: return decode_pairs<T, INT4>(a, pairs, panel, from, to, words);
        case E2M1: return decode_pairs<T, E2M1>(a, pairs, panel, from, to, words);
        case INT8: return decode_pairs<T, INT8>(a, pairs, panel, from, to, words);
        case E4M3: return decode_pairs<T, E4M3>(a, pairs, panel, from, to, words);
        default: return decode_pairs<T, UINT8>(a, pairs, panel, from, to, words);
    }
}

}  // namespace
