// Weights in fewer bits, decoded to the words of a panel (cpu_products.cpp) just before rows meet them: what is read
// from memory is as small as what is stored, and products and their order are those of plain weights.
//
//     codes    [panels][pairs of columns][64] bytes, two codes of four bits each, the even column's below
//              [panels][pairs of columns][2][64] bytes, one code each
//              [panels][pairs of pairs][64] bytes, four codes of two bits each, the first column's lowest
//     scale    [panels][groups of columns][64], in the kind of numbers that the files have; zero beside it, a byte each
//     factor   [panels][64] float32: what scales are multiplied with, or divided by
//     high     [panels][runs of 8 or 4 columns][64] bytes: the last bit of codes of three and five, or two of six
//     least    [panels][groups][64]; block_scale, block_least [panels][blocks of groups][64] float16: two-level scales
//
// A number is (code - zero) * scale - least, in float32, rounded once: as workers/models/unpacked.py computes it.

#pragma once

#include <algorithm>

#include "numbers.h"
#include "vectors.h"

namespace {

enum CodeKind { INT4 = 0, E2M1 = 1, INT8 = 2, E4M3 = 3, UINT8 = 4, INT5 = 5, INT6 = 6, INT2 = 7, INT3 = 8, IQ4 = 9 };
enum ScaleKind { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT8 = 3, POWER = 4, WHOLE = 5 };

struct Codes {
    const uint8_t* codes;  // null: the weight is not packed in fewer bits
    const void* scale;
    const uint8_t* zero;   // null: none, but `middle`
    const float* factor;   // null: none
    const uint8_t* high;   // of codes of three, five and six bits
    const void* least;     // null: none
    const float16* block_scale;  // null: scales have no blocks
    const float16* block_least;
    int64_t groups;        // of columns, in each panel
    int64_t blocks;        // of groups, in each panel
    int32_t code_kind, scale_kind, least_kind;
    int32_t columns;       // of a group; even
    int32_t offset;        // how many columns of the first group lie before the first; even
    int32_t block_groups;  // groups of a block
    int32_t block_offset;  // how many groups of the first block lie before the first
    float middle;          // is subtracted from every code, too
    int32_t divides;       // by the factor
};

inline int scale_bytes(int kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 || kind == FLOAT16 ? 2 : 1; }
// Bits of each code that lie in `high`.
constexpr int high_bits(int kind) { return kind == INT3 || kind == INT5 ? 1 : kind == INT6 ? 2 : 0; }
constexpr bool is_of_two_bits(int kind) { return kind == INT2 || kind == INT3; }
// Whether four bits stand for a number of a table.
constexpr bool is_of_a_table(int kind) { return kind == E2M1 || kind == IQ4; }
constexpr bool is_of_four_bits(int kind) { return kind == INT4 || is_of_a_table(kind) || kind == INT5 || kind == INT6; }

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// The bits of an e4m3, seven further up, and its sign once more are those of a float16 whose exponents mean 256 times less.
constexpr float E4M3_UNIT = 256.0f;
constexpr int16_t E4M3_BITS = int16_t(0xBF80);

inline float e4m3(uint8_t code) {  // in units of 256
    const uint16_t bits = uint16_t(int8_t(code) * 128) & uint16_t(E4M3_BITS);
    float16 value;
    std::memcpy(&value, &bits, 2);
    return float(value);
}

constexpr float E2M1_VALUES[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float INT4_VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <bool IS_SIGNED = false>
inline Ints bytes_at(const uint8_t* at) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    return (Ints)(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__) && defined(__FMA__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
    return (Ints)(IS_SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Ints wide;
    for (int n = 0; n < WIDTH; n++) wide[n] = IS_SIGNED ? int8_t(at[n]) : at[n];
    return wide;
#endif
}

// What a table has for the lowest four bits of each code.
inline Lanes looked_up(const float* table, Ints code) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__) && defined(__FMA__)
    const Lanes first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)code);  // by three bits of each
    const Lanes last = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)code);
    return _mm256_blendv_ps(first, last, (Lanes)(code << 28));
#else
    Lanes found;
    for (int n = 0; n < WIDTH; n++) found[n] = table[code[n] & 15];
    return found;
#endif
}

// In units of 256. NaN is none of these: no weight is loaded that has it.
inline Lanes e4m3_lanes(const uint8_t* at) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(E4M3_BITS)));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(E4M3_BITS)));
#else
    Lanes numbers;
    for (int n = 0; n < WIDTH; n++) numbers[n] = e4m3(at[n]);
    return numbers;
#endif
}

template <int KIND>
inline Lanes byte_numbers(const uint8_t* at) {
    if (KIND == E4M3) return e4m3_lanes(at);
    return floats_of(bytes_at<KIND == INT8>(at));
}

// Of four bits. Without a table of sixteen in one instruction it is quicker to convert what is no float.
template <int KIND>
inline Lanes small_numbers(Ints code) {
    if (!is_of_a_table(KIND) && WIDTH < 16) return floats_of(code & 15);
    return looked_up(KIND == E2M1 ? E2M1_VALUES : KIND == IQ4 ? IQ4_VALUES : INT4_VALUES, code);
}

// Numbers of codes for the lanes of one vector, of an even column and the odd one after it. Those of E4M3 are in units of 256.
template <int KIND>
inline void pair_numbers(const uint8_t* at, int v, Lanes& even, Lanes& odd) {
    if constexpr (is_of_four_bits(KIND)) {
        const Ints code = bytes_at(at + v * WIDTH);
        even = small_numbers<KIND>(code);
        odd = small_numbers<KIND>(code >> 4);
    } else {
        even = byte_numbers<KIND>(at + v * WIDTH);
        odd = byte_numbers<KIND>(at + 64 + v * WIDTH);
    }
}

// Adds what some bits of a code stand for, above others. at: the byte of the pair; first: the even column's lowest bit.
template <int BITS, int ABOVE>
inline void add_bits(const uint8_t* at, int first, int v, Lanes& even, Lanes& odd) {
    constexpr int MASK = (1 << BITS) - 1;
    const Ints byte = bytes_at(at + v * WIDTH) >> first;
    even = even + floats_of((byte & MASK) << ABOVE);
    odd = odd + floats_of((byte >> BITS & MASK) << ABOVE);
}

// Numbers of 16 bits, all at once: a compiler that may not compute in float16 would widen one after the other.
inline Lanes float16_lanes(const float16* at) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
    float numbers[WIDTH];
    for (int n = 0; n < WIDTH; n++) numbers[n] = float(at[n]);
    return load_lanes(numbers);
#endif
}

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
            for (int i = 0; i < 64; i += WIDTH) store_lanes(float16_lanes(static_cast<const float16*>(at) + n + i), to + i);
            return;
        case FLOAT8:
            for (int i = 0; i < 64; i += WIDTH) {
                const Lanes units = e4m3_lanes(static_cast<const uint8_t*>(at) + n + i);
                store_lanes(units * all_lanes(E4M3_UNIT), to + i);
            }
            return;
        case WHOLE:
            for (int i = 0; i < 64; i++) to[i] = float(static_cast<const int8_t*>(at)[n + i]);
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
    const Words low = (Words)nearest_bfloat16(even), high = (Words)nearest_bfloat16(odd);  // weights are finite
    const Ints both = (Ints)high_halves(high) | (Ints)((Bits32)low >> 16);
    std::memcpy(to, &both, sizeof both);
#endif
}

// Keeps the compiler from making one fused operation of a product and what is subtracted from it.
inline Lanes rounded(Lanes product) {
#if defined(__x86_64__) && defined(__AVX__)
    asm("" : "+x"(product));
#elif !defined(__x86_64__)
    volatile float kept[WIDTH];
    float back[WIDTH];
    store_lanes(product, back);
    for (int n = 0; n < WIDTH; n++) kept[n] = back[n];
    for (int n = 0; n < WIDTH; n++) back[n] = kept[n];
    product = load_lanes(back);
#endif
    return product;
}

// Scales or leasts of a group, times the factor of its block: 64 numbers.
inline void load_group(const Codes& a, const void* from, int kind, const float16* block, int64_t panel, int64_t group,
                       float* to) {
    load_scales(from, kind, (panel * a.groups + group) * 64, to);
    if (!block) return;
    block += (panel * a.blocks + (group + a.block_offset) / a.block_groups) * 64;
    for (int n = 0; n < 64; n += WIDTH) store_lanes(load_lanes(to + n) * float16_lanes(block + n), to + n);
}

// Pairs [from, to) of the columns of a panel, as the words of 64 outputs.
template <class T, int KIND, bool HAS_LEAST>
void decode_pairs(const Codes& a, int64_t pairs, int64_t panel, int64_t from, int64_t to, uint32_t* words) {
    constexpr int VECTORS = 64 / WIDTH, PAIR_WORDS = sizeof(T) == 4 ? 128 : 64;
    constexpr int PAIR_BITS = 2 * high_bits(KIND), BYTE_PAIRS = PAIR_BITS ? 8 / PAIR_BITS : 1;  // of `high`
    const int pair_bytes = is_of_two_bits(KIND) ? 32 : is_of_four_bits(KIND) ? 64 : 128;
    const uint8_t* codes = a.codes + panel * ((pairs * pair_bytes + 63) / 64 * 64);
    const uint8_t* high = a.high + panel * ((pairs + BYTE_PAIRS - 1) / BYTE_PAIRS) * 64;
    alignas(64) float scale[64], zero[64], least[64];
    for (int64_t pair = from; pair < to;) {
        const int64_t group = (2 * pair + a.offset) / a.columns;
        const int64_t end = std::min(to, ((group + 1) * a.columns - a.offset) / 2);
        // What all of a group have in common.
        load_group(a, a.scale, a.scale_kind, a.block_scale, panel, group, scale);
        for (int n = 0; a.factor && n < 64; n++)
            scale[n] = a.divides ? scale[n] / a.factor[panel * 64 + n] : scale[n] * a.factor[panel * 64 + n];
        const uint8_t* zeros_at = a.zero ? a.zero + (panel * a.groups + group) * 64 : nullptr;
        for (int n = 0; n < 64; n++) zero[n] = (zeros_at ? float(zeros_at[n]) : 0.0f) + a.middle;
        if (HAS_LEAST) load_group(a, a.least, a.least_kind, a.block_least, panel, group, least);
        Lanes scales[VECTORS], zeros[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            constexpr float UNIT = KIND == E4M3 ? E4M3_UNIT : 1.0f;  // a power of two: nothing is rounded here
            scales[v] = load_lanes(scale + v * WIDTH) * all_lanes(UNIT);
            zeros[v] = load_lanes(zero + v * WIDTH) * all_lanes(1.0f / UNIT);
        }
        for (; pair < end; pair++, words += PAIR_WORDS) {
            const uint8_t* here = codes + (is_of_two_bits(KIND) ? pair / 2 * 64 : pair * pair_bytes);
            prefetch_far(here + 2048);
            for (int v = 0; v < VECTORS; v++) {
                Lanes even = all_lanes(0.0f), odd = even;
                if constexpr (is_of_two_bits(KIND))
                    add_bits<2, 0>(here, int(pair % 2) * 4, v, even, odd);
                else
                    pair_numbers<KIND>(here, v, even, odd);
                if constexpr (PAIR_BITS > 0)
                    add_bits<PAIR_BITS / 2, is_of_two_bits(KIND) ? 2 : 4>(
                        high + pair / BYTE_PAIRS * 64, int(pair % BYTE_PAIRS) * PAIR_BITS, v, even, odd);
                even = (even - zeros[v]) * scales[v];
                odd = (odd - zeros[v]) * scales[v];
                if constexpr (HAS_LEAST) {
                    even = rounded(even) - load_lanes(least + v * WIDTH);
                    odd = rounded(odd) - load_lanes(least + v * WIDTH);
                }
                store_pair(even, odd, words + v * WIDTH, static_cast<T*>(nullptr));
            }
        }
    }
}

template <class T, int KIND>
void decode_kind(const Codes& a, int64_t pairs, int64_t panel, int64_t from, int64_t to, uint32_t* words) {
    if (a.least) return decode_pairs<T, KIND, true>(a, pairs, panel, from, to, words);
    decode_pairs<T, KIND, false>(a, pairs, panel, from, to, words);
}

template <class T>
void decode(const Codes& a, int64_t pairs, int64_t panel, int64_t from, int64_t to, uint32_t* words) {
    switch (a.code_kind) {
        case INT4: return decode_kind<T, INT4>(a, pairs, panel, from, to, words);
        case E2M1: return decode_kind<T, E2M1>(a, pairs, panel, from, to, words);
        case INT8: return decode_kind<T, INT8>(a, pairs, panel, from, to, words);
        case E4M3: return decode_kind<T, E4M3>(a, pairs, panel, from, to, words);
        case INT5: return decode_kind<T, INT5>(a, pairs, panel, from, to, words);
        case INT6: return decode_kind<T, INT6>(a, pairs, panel, from, to, words);
        case INT2: return decode_kind<T, INT2>(a, pairs, panel, from, to, words);
        case INT3: return decode_kind<T, INT3>(a, pairs, panel, from, to, words);
        case IQ4: return decode_kind<T, IQ4>(a, pairs, panel, from, to, words);
        default: return decode_kind<T, UINT8>(a, pairs, panel, from, to, words);
    }
}

}  // namespace
