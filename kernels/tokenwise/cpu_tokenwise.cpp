// What a model does to each token by itself between its matrix products, on a CPU. Plain C ABI; see tokenwise/native.py.
//
// torch does each of these in several passes and calls: a norm of 32 tokens takes 7 of them and 17 us, of which 2 are
// arithmetic. Here a row is read once and written once. Few rows are done by the calling thread, since to wake the
// others costs more.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "numbers.h"

namespace {

constexpr int64_t WORTH_SHARING = 1 << 15;  // numbers of which it pays to wake the other threads

// out = x / sqrt(mean(x^2) + eps) * scale. rounds_first: x / sqrt(..) becomes a T before it is scaled.
template <class T>
void norm_row(const T* x, const float* scale, T* out, int width, float eps, bool rounds_first) {
    Vec squares = {};
    int d = 0;
    for (; d + LANES <= width; d += LANES) {
        const Vec v = load(x + d);
        squares += v * v;
    }
    float total = sum(squares);
    for (; d < width; d++) total += to_float(x[d]) * to_float(x[d]);
    const float shrink = 1.0f / std::sqrt(total / float(width) + eps);
    for (d = 0; d + LANES <= width; d += LANES) {
        Vec v = load(x + d) * shrink;
        if (rounds_first && !std::is_same_v<T, float>) {
            T rounded[LANES];
            store(v, rounded);
            v = load(rounded);
        }
        store(v * load(scale + d), out + d);
    }
    for (; d < width; d++) {
        T rounded;
        from_float(to_float(x[d]) * shrink, &rounded);
        from_float((rounds_first ? to_float(rounded) : to_float(x[d]) * shrink) * scale[d], out + d);
    }
}

// Turns pairs of numbers of a head by the angles of its token: (i, i + half) or (2i, 2i + 1). The upper half may have
// angles of its own, `upper` behind those of the lower.
template <class T>
void rotate_halves(T* head, const T* cos, const T* sin, int width, int upper) {
    const int half = width / 2;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const Vec low = load(head + i), high = load(head + half + i);
        store(low * load(cos + i) - high * load(sin + i), head + i);
        store(high * load(cos + upper + i) + low * load(sin + upper + i), head + half + i);
    }
    for (; i < half; i++) {
        const float low = to_float(head[i]), high = to_float(head[half + i]);
        from_float(low * to_float(cos[i]) - high * to_float(sin[i]), head + i);
        from_float(high * to_float(cos[upper + i]) + low * to_float(sin[upper + i]), head + half + i);
    }
}

template <class T>
void rotate_pairs(T* head, const T* cos, const T* sin, int width) {
    for (int i = 0; i + 1 < width; i += 2) {
        const float even = to_float(head[i]), odd = to_float(head[i + 1]);
        from_float(even * to_float(cos[i]) - odd * to_float(sin[i]), head + i);
        from_float(odd * to_float(cos[i + 1]) + even * to_float(sin[i + 1]), head + i + 1);
    }
}

// x / (1 + exp(-s)), which is x * sigmoid(s), by an exponential that is at most 1
inline Vec gate(Vec x, Vec s) {
    const Vec power = two_to((s < 0.0f ? s : -s) * 1.44269504f);
    return x * (s < 0.0f ? power : Vec{} + 1.0f) / (1.0f + power);
}

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2, SIGMOID = 3 };

template <Activation A>
inline Vec activate(Vec x) {
    if constexpr (A == SILU) return gate(x, x);
    if constexpr (A == SIGMOID) return gate(Vec{} + 1.0f, x);
    if constexpr (A == GELU_TANH)  // 0.5 (1 + tanh(u)) is sigmoid(2u)
        return gate(x, 1.5957691216f * (x + 0.044715f * x * x * x));
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return x;
}

// Calls `what` with the activation as a constant.
template <class Function>
inline void with_activation(int activation, Function what) {
    switch (activation) {
        case SILU: return what(std::integral_constant<Activation, SILU>());
        case GELU_TANH: return what(std::integral_constant<Activation, GELU_TANH>());
        case GELU: return what(std::integral_constant<Activation, GELU>());
        default: return what(std::integral_constant<Activation, SIGMOID>());
    }
}

template <Activation A, class T>
void activate_numbers(const T* x, T* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t here = std::min<int64_t>(LANES, count - i);
        T some[LANES] = {};
        std::copy(x + i, x + i + here, some);
        store(activate<A>(load(some)), some);
        std::copy(some, some + here, out + i);
    }
}

template <Activation A, class T>
inline void gate_vector(const T* gates, const T* up, T* out) {
    Vec activated = activate<A>(load(gates));
    if (!std::is_same_v<T, float>) {  // transformers multiplies what was rounded
        T rounded[LANES];
        store(activated, rounded);
        activated = load(rounded);
    }
    store(activated * load(up), out);
}

template <Activation A, class T>
void gate_row(const T* gate_up, T* out, int width) {
    int d = 0;
    for (; d + LANES <= width; d += LANES) gate_vector<A>(gate_up + d, gate_up + width + d, out + d);
    if (d == width) return;
    T gates[LANES] = {}, up[LANES] = {}, last[LANES];
    std::copy(gate_up + d, gate_up + width, gates);
    std::copy(gate_up + width + d, gate_up + 2 * width, up);
    gate_vector<A>(gates, up, last);
    std::copy(last, last + width - d, out + d);
}

}  // namespace

extern "C" {

struct Heads {
    void* tokens;                  // [T, query heads, then key heads, then more], changed in place
    const float *query_scale, *key_scale;  // of the norms, or null
    const void *cos, *sin;         // [T, angles], dense; or null
    int64_t token_stride;          // in elements
    int32_t count, heads, kv_heads, head_dim;
    int32_t query_norm_width, key_norm_width;  // a head's, or all heads'
    int32_t rotary_dim, angles, in_pairs, rounds_first;  // angles: rotary_dim, or half as many
    float eps;
    int32_t kind;
};

}  // extern "C"

namespace {

template <class T>
void prepare_heads(const Heads& h) {
    const int query_width = h.heads * h.head_dim, key_width = h.kv_heads * h.head_dim;
#pragma omp parallel for schedule(static) if (h.count * int64_t(query_width + key_width) >= WORTH_SHARING)
    for (int t = 0; t < h.count; t++) {
        T* query = static_cast<T*>(h.tokens) + t * h.token_stride;
        T* key = query + query_width;
        if (h.query_scale)
            for (int d = 0; d < query_width; d += h.query_norm_width)
                norm_row(query + d, h.query_scale, query + d, h.query_norm_width, h.eps, h.rounds_first);
        if (h.key_scale)
            for (int d = 0; d < key_width; d += h.key_norm_width)
                norm_row(key + d, h.key_scale, key + d, h.key_norm_width, h.eps, h.rounds_first);
        if (!h.cos) continue;
        const T* cos = static_cast<const T*>(h.cos) + int64_t(t) * h.angles;
        const T* sin = static_cast<const T*>(h.sin) + int64_t(t) * h.angles;
        for (int d = 0; d < query_width + key_width; d += h.head_dim)
            if (h.in_pairs)
                rotate_pairs(query + d, cos, sin, h.rotary_dim);
            else
                rotate_halves(query + d, cos, sin, h.rotary_dim, h.angles - h.rotary_dim / 2);
    }
}

}  // namespace

extern "C" {

void intarsia_prepare_heads(const Heads* h) {
    with_kind(h->kind, [&](auto* number) { prepare_heads<std::remove_pointer_t<decltype(number)>>(*h); });
}

// x, out: [rows, width], dense; scale: [width]
void intarsia_rms_norm(const void* x, const float* scale, void* out, int64_t rows, int32_t width, float eps,
                       int32_t rounds_first, int32_t kind) {
    with_kind(kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const T* from = static_cast<const T*>(x);
        T* to = static_cast<T*>(out);
#pragma omp parallel for schedule(static) if (rows * width >= WORTH_SHARING)
        for (int64_t row = 0; row < rows; row++)
            norm_row(from + row * width, scale, to + row * width, width, eps, rounds_first);
    });
}

// gate_up: [rows, 2 * width], gates first, dense; out: [rows, width], dense
void intarsia_gate(const void* gate_up, void* out, int64_t rows, int32_t width, int32_t activation, int32_t kind) {
    with_kind(kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const T* from = static_cast<const T*>(gate_up);
        T* to = static_cast<T*>(out);
        with_activation(activation, [&](auto constant) {
#pragma omp parallel for schedule(static) if (rows * width >= WORTH_SHARING / 4)
            for (int64_t row = 0; row < rows; row++)
                gate_row<decltype(constant)::value>(from + row * 2 * width, to + row * width, width);
        });
    });
}

// x, out: [count]
void intarsia_activate(const void* x, void* out, int64_t count, int32_t activation, int32_t kind) {
    constexpr int64_t TILE = 4096;
    with_kind(kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const T* from = static_cast<const T*>(x);
        T* to = static_cast<T*>(out);
        with_activation(activation, [&](auto constant) {
#pragma omp parallel for schedule(static) if (count >= WORTH_SHARING / 4)
            for (int64_t i = 0; i < count; i += TILE)
                activate_numbers<decltype(constant)::value>(from + i, to + i, std::min(TILE, count - i));
        });
    });
}

}  // extern "C"
