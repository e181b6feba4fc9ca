// Numbers of three kinds, sixteen at a time, computed with as float32. Included by every kernel of this folder.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));

typedef _Float16 float16;
typedef float16 Float16s __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &wide, 4);
    return result;
}
inline float to_float(float16 x) { return x; }
inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, float16* to) { *to = float16(x); }
inline void from_float(float x, bfloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        to->bits = 0x7FC0;  // NaN stays NaN
    else
        to->bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}
inline Vec load(const float* from) {
    Vec result;
    std::memcpy(&result, from, sizeof result);
    return result;
}
inline Vec load(const bfloat16* from) {
    Half narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    Bits wide = __builtin_convertvector(narrow, Bits) << 16;
    Vec result;
    std::memcpy(&result, &wide, sizeof result);
    return result;
}
inline Vec load(const float16* from) {
    Float16s narrow;
    std::memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(narrow, Vec);
}
// Halves are added, then quarters, and so on: always in this order.
inline float sum(Vec v) {
    typedef int32_t Places __attribute__((vector_size(4 * LANES)));
    v += __builtin_shuffle(v, Places{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, Places{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, Places{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return v[0] + v[1];
}
// In lanes, from the first number to the last; what fills no vector comes after.
template <class T>
inline float sum_of(const T* x, int width) {
    Vec sums = {};
    int d = 0;
    for (; d + LANES <= width; d += LANES) sums += load(x + d);
    float total = sum(sums);
    for (; d < width; d++) total += to_float(x[d]);
    return total;
}
// Of x - middle, in the same order.
template <class T>
inline float sum_of_squares(const T* x, int width, float middle = 0.0f) {
    Vec squares = {};
    int d = 0;
    for (; d + LANES <= width; d += LANES) {
        const Vec v = load(x + d) - middle;
        squares += v * v;
    }
    float total = sum(squares);
    for (; d < width; d++) {
        const float v = to_float(x[d]) - middle;
        total += v * v;
    }
    return total;
}
// 2 to the power of each, which is at most 0; of what is below -100, nothing. To about the last bit of a float. Less
// would be subnormal as soon as it is multiplied, and some processors take many times as long for such numbers.
inline Vec two_to(Vec x) {
    typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
    const Vec lowest = Vec{} - 100.0f;
    const Ints is_nothing = x < lowest;
    x = x < lowest ? lowest : x;
    const Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // to the nearest, as x is not positive
    const Vec f = x - __builtin_convertvector(whole, Vec);
    Vec y = f * 1.54035304e-4f + 1.33335581e-3f;
    y = y * f + 9.61812911e-3f;
    y = y * f + 5.55041087e-2f;
    y = y * f + 0.240226507f;
    y = y * f + 0.693147181f;
    y = y * f + 1.0f;
    Ints bits;
    std::memcpy(&bits, &y, sizeof y);
    bits = (bits + (whole << 23)) & ~is_nothing;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}
// x / (1 + exp(-s)), which is x * sigmoid(s), by an exponential that is at most 1
inline Vec gated(Vec x, Vec s) {
    const Vec power = two_to((s < 0.0f ? s : -s) * 1.44269504f);
    return x * (s < 0.0f ? power : Vec{} + 1.0f) / (1.0f + power);
}
inline void store(Vec v, float* to) { std::memcpy(to, &v, sizeof v); }
inline void store(Vec v, float16* to) {
    const Float16s narrow = __builtin_convertvector(v, Float16s);
    std::memcpy(to, &narrow, sizeof narrow);
}
inline void store(Vec v, bfloat16* to) {  // as from_float does
    Bits bits;
    std::memcpy(&bits, &v, sizeof bits);
    const Bits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const Half narrow = __builtin_convertvector((bits & 0x7FFFFFFF) > 0x7F800000 ? Bits{} + 0x7FC0 : rounded, Half);
    std::memcpy(to, &narrow, sizeof narrow);
}

// Calls `what` with a null pointer to the type of numbers that `kind` names, as cpp.py counts them.
template <class Function>
inline void with_kind(int kind, Function what) {
    switch (kind) {
        case 0: return what(static_cast<float*>(nullptr));
        case 1: return what(static_cast<bfloat16*>(nullptr));
        default: return what(static_cast<float16*>(nullptr));
    }
}

}  // namespace
