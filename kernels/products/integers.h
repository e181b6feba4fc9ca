// Codes and inputs as bytes, and what their products sum to, in whole numbers: exactly, on any processor.
//
//     codes    [panels][runs of 8, 16 or 32 columns][64 outputs] words of the four, two or one low bits of each code;
//              [panels][quads of columns][64] words of codes of eight bits. `high` likewise, of one or two bits
//     opened   [quads of columns][64] words: a byte for each of four columns
//
// A word of a run has four columns in its four bytes' lowest bits, the next four above them, and so on. So a vector of
// words is opened by a mask and a shift, and meets four inputs of a row, which are one word too. Columns that fill up the
// last block of 32 meet inputs of zero.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "decode.h"
#include "panels.h"
#include "vectors.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(4 * WIDTH)));

// -- sums of products --------------------------------------------------------------------------------------------------

// Whether the processor adds up four products of a byte without a sign and one with a sign at once. Where it does not,
// two products are added up in 16 bits first: those of codes of eight bits do not fit them unless they have signs, too.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool HAS_FOURS = true;
constexpr char INTEGERS_NAME[] = "AVX-512 VNNI";
#elif defined(__AVX512BW__)
constexpr bool HAS_FOURS = false;
constexpr char INTEGERS_NAME[] = "AVX-512";
#elif defined(__AVXVNNI__) && !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
constexpr bool HAS_FOURS = true;
constexpr char INTEGERS_NAME[] = "AVX2 VNNI";
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
constexpr bool HAS_FOURS = false;
constexpr char INTEGERS_NAME[] = "AVX2";
#else
constexpr bool HAS_FOURS = true;
constexpr char INTEGERS_NAME[] = "plain";
#endif

// What is subtracted from codes of all eight bits before they are multiplied, as bytes with signs.
constexpr int LESS_OF_8_BITS = HAS_FOURS ? 0 : 128;
constexpr int OF_8_BITS = 255;

// The largest code of a kind, once opened; kinds that are alike share the larger one, and so their products.
constexpr int most_of(int kind) {
    switch (kind) {
        case INT2: case INT3: case INT4: return 15;
        case E2M1: case INT5: return 31;
        case INT6: return 63;
        default: return OF_8_BITS;
    }
}

// Of how many quads products of such codes are added up before they leave 16 bits. An input is at least -128.
constexpr int quads_at_once(int most) {
    if (HAS_FOURS || most == OF_8_BITS) return 1;
    int quads = 8;
    while (quads * 2 * 128 * most > INT16_MAX) quads /= 2;
    return quads;
}

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
// |code| * (the input with the code's sign) is at most 128 * 127, and two of them fit 16 bits.
inline void make_codes_positive(Words& code, Words& input) {
    input = _mm512_mask_sub_epi8(input, _mm512_movepi8_mask(code), _mm512_setzero_si512(), input);
    code = _mm512_abs_epi8(code);
}
inline Words add_pairs(Words pairs, Words code, Words input) {
    return _mm512_add_epi16(pairs, _mm512_maddubs_epi16(code, input));
}
inline Ints sums_of_pairs(Words pairs) { return (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
#elif !defined(__AVX512F__) && !defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__)
inline void make_codes_positive(Words& code, Words& input) {
    input = _mm256_sign_epi8(input, code);
    code = _mm256_abs_epi8(code);
}
inline Words add_pairs(Words pairs, Words code, Words input) {
    return _mm256_add_epi16(pairs, _mm256_maddubs_epi16(code, input));
}
inline Ints sums_of_pairs(Words pairs) { return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#endif

// sum + codes * inputs, of the four bytes of each lane, of N quads. Inputs have signs; -128 is none of them unless it counts
// for nothing. Where fours are not added up at once, codes of all eight bits are 128 less.
template <int MOST, int N>
inline Ints add_products(Ints sum, const Words (&codes)[N], const Words (&inputs)[N]) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    for (int n = 0; n < N; n++) sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, codes[n], inputs[n]);
    return sum;
#elif defined(__AVXVNNI__) && !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
    for (int n = 0; n < N; n++) sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, codes[n], inputs[n]);
    return sum;
#elif defined(__AVX512BW__) || (!defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__))
    constexpr int AT_ONCE = quads_at_once(MOST);
    for (int n = 0; n < N; n += AT_ONCE) {
        Words pairs = {};
        for (int i = n; i < std::min(N, n + AT_ONCE); i++) {
            Words code = codes[i], input = inputs[i];
            if (MOST == OF_8_BITS) make_codes_positive(code, input);
            pairs = add_pairs(pairs, code, input);
        }
        sum += sums_of_pairs(pairs);
    }
    return sum;
#else
    for (int n = 0; n < N; n++) {
        uint8_t code[4 * WIDTH];
        int8_t input[4 * WIDTH];
        std::memcpy(code, &codes[n], sizeof code);
        std::memcpy(input, &inputs[n], sizeof input);
        for (int lane = 0; lane < WIDTH; lane++)
            for (int j = 0; j < 4; j++) sum[lane] += int32_t(code[4 * lane + j]) * input[4 * lane + j];
    }
    return sum;
#endif
}

// sum + a * b, rounded once where the processor does that everywhere, else twice everywhere.
inline Lanes add_scaled(Lanes sum, Lanes a, Lanes b) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
    return fused(a, b, sum);
#else
    return sum + rounded(a * b);
#endif
}

// -- codes that lie as products read them ------------------------------------------------------------------------------

constexpr int QUAD_BYTES = 256;  // four columns of 64 outputs

constexpr int low_bits(int kind) { return is_of_two_bits(kind) ? 2 : is_of_four_bits(kind) ? 4 : 8; }

// Twice the numbers of e2m1, and 12 more, so that they have no signs.
constexpr uint8_t E2M1_BYTES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int E2M1_LESS = 12;

// The numbers of IQ4, and 128 more, as codes of eight bits have it.
constexpr uint8_t IQ4_BYTES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Four bits of each byte as the numbers of a table.
inline Bytes looked_up_bytes(const uint8_t* numbers, Bytes code) {
#if defined(__AVX512BW__)
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)code);
#elif !defined(__AVX512F__) && defined(__AVX2__) && defined(__FMA__)
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)code);
#else
    Bytes found;
    for (int n = 0; n < 4 * WIDTH; n++) found[n] = numbers[code[n]];
    return found;
#endif
}

inline Bytes load_bytes(const uint8_t* from) {
    Bytes v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// Bits of the quad-th four columns of a run, in each byte above ABOVE others.
template <int BITS, int ABOVE>
inline Bytes bits_of(Bytes run, int quad) {
    typedef uint16_t Halves __attribute__((vector_size(4 * WIDTH)));  // vectors shift no bytes; neighbours' bits are masked
    const int down = BITS * quad - ABOVE;
    const Halves moved = down < 0 ? (Halves)run << -down : (Halves)run >> down;
    return (Bytes)moved & uint8_t(((1 << BITS) - 1) << ABOVE);
}

constexpr int BLOCK_QUADS = 8;

// How a block of 32 columns lies in memory. Not of codes of eight bits.
template <int KIND>
struct BlockOfCodes {
    static constexpr int LOW = low_bits(KIND), LOW_QUADS = 8 / LOW, HIGH = high_bits(KIND), HIGH_QUADS = HIGH ? 8 / HIGH : 1;
    static constexpr int LOW_BYTES = BLOCK_QUADS / LOW_QUADS * QUAD_BYTES;
    static constexpr int HIGH_BYTES = HIGH ? BLOCK_QUADS / HIGH_QUADS * QUAD_BYTES : 0;
    const uint8_t *low, *high;

    // Of a panel of so many blocks.
    BlockOfCodes(const Codes& a, int64_t blocks, int64_t panel, int64_t block)
        : low(a.codes + (panel * blocks + block) * LOW_BYTES), high(a.high + (panel * blocks + block) * HIGH_BYTES) {}

    void go_on() { low += LOW_BYTES, high += HIGH_BYTES; }

    void fetch_what_comes() const {
        for (int line = 0; line < LOW_BYTES; line += 64) prefetch_far(low + 2048 + line);
    }

    // The v-th vector of outputs: codes [8 quads]
    void open(int v, Words* codes) const {
        for (int quad = 0; quad < BLOCK_QUADS; quad++) {
            const int at = v * 4 * WIDTH;
            Bytes code = bits_of<LOW, 0>(load_bytes(low + quad / LOW_QUADS * QUAD_BYTES + at), quad % LOW_QUADS);
            if constexpr (is_of_a_table(KIND)) code = looked_up_bytes(KIND == E2M1 ? E2M1_BYTES : IQ4_BYTES, code);
            if constexpr (HIGH > 0)
                code |= bits_of<HIGH, LOW>(load_bytes(high + quad / HIGH_QUADS * QUAD_BYTES + at), quad % HIGH_QUADS);
            codes[quad] = (Words)code;
        }
    }
};

// Blocks [from, to) of a panel, opened. `blocks`: of the whole panel. Not for codes of eight bits.
template <int KIND>
void open_blocks(const Codes& a, int64_t blocks, int64_t panel, int64_t from, int64_t to, uint8_t* opened) {
    BlockOfCodes<KIND> here(a, blocks, panel, from);
    for (int64_t block = from; block < to; block++, here.go_on(), opened += BLOCK_QUADS * QUAD_BYTES) {
        here.fetch_what_comes();
        for (int v = 0; v < 64 / WIDTH; v++) {
            Words codes[BLOCK_QUADS];
            here.open(v, codes);
            for (int quad = 0; quad < BLOCK_QUADS; quad++)
                std::memcpy(opened + quad * QUAD_BYTES + v * 4 * WIDTH, &codes[quad], 4 * WIDTH);
        }
    }
}

// -- how codes come to lie so ------------------------------------------------------------------------------------------

// Four neighbouring fields of BITS bits, each in the lowest bits of a byte of its own; and back.
template <int BITS>
inline uint32_t parted(uint32_t fields) {
    constexpr uint32_t TWO = ((1u << (2 * BITS)) - 1) * 0x00010001u, ONE = ((1u << BITS) - 1) * 0x01010101u;
    fields = (fields | fields << (2 * (8 - BITS))) & TWO;
    return (fields | fields << (8 - BITS)) & ONE;
}
template <int BITS>
inline uint32_t together(uint32_t bytes) {
    constexpr uint32_t TWO = ((1u << (2 * BITS)) - 1) * 0x00010001u, ONE = ((1u << BITS) - 1) * 0x01010101u;
    bytes &= ONE;
    bytes = (bytes | bytes >> (8 - BITS)) & TWO;
    return (bytes | bytes >> (2 * (8 - BITS))) & ((1u << (4 * BITS)) - 1);
}

// A word of a row's codes, the first column's bits lowest, as a word of a run; and back.
template <int BITS, bool IS_BACK>
inline uint32_t word_of_run(uint32_t word) {
    if constexpr (BITS == 8) {
        return word;
    } else {
        uint32_t turned = 0;
        for (int quad = 0; quad < 8 / BITS; quad++)
            if (IS_BACK)
                turned |= together<BITS>(word >> (BITS * quad)) << (4 * BITS * quad);
            else
                turned |= parted<BITS>(word >> (4 * BITS * quad) & ((1u << (4 * BITS)) - 1)) << (BITS * quad);
        return turned;
    }
}

// rows: [outputs][row_bytes]; panels: [panels][words][64], zero behind the last code of a row; `flipped` bits of each byte
// are turned over.
template <int BITS>
void lay(const uint8_t* rows, int64_t row_bytes, uint32_t* panels, int64_t outputs, int64_t words, uint32_t flipped) {
    lay_panels(rows, row_bytes, row_bytes, outputs, words, panels,
               [&](uint32_t word) { return word_of_run<BITS, false>(word ^ flipped); });
}

// The other way round.
template <int BITS>
void lay_back(uint8_t* rows, int64_t row_bytes, const uint32_t* panels, int64_t outputs, int64_t words, uint32_t flipped) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < outputs; row++)
        for (int64_t w = 0; 4 * w < row_bytes; w++) {
            const uint32_t word = word_of_run<BITS, true>(panels[(row / 64 * words + w) * 64 + row % 64]) ^ flipped;
            std::memcpy(rows + row * row_bytes + 4 * w, &word, std::min<int64_t>(4, row_bytes - 4 * w));
        }
}

}  // namespace
