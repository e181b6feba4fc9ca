// What a model does to each token by itself between its matrix products, on a CPU. Plain C ABI; see tokenwise/cpu.py.
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

// As wide as before, after it was a T.
template <class T>
inline Vec rounded(Vec x) {
    if constexpr (std::is_same_v<T, float>) return x;
    T narrow[LANES];
    store(x, narrow);
    return load(narrow);
}

// The narrower kind only if both are: what is wide on one side is not rounded on the way.
template <class A, class B>
using Between = std::conditional_t<std::is_same_v<A, B>, A, float>;

// out = x / sqrt(mean(x^2) + eps) * scale. rounds_first: x / sqrt(..) becomes a number of their kind before it is scaled.
// is_centered: x is what it is more than its mean.
template <class T, class Out>
void norm_row(const T* x, const float* scale, Out* out, int width, float eps, bool rounds_first, bool is_centered) {
    const float middle = is_centered ? sum_of(x, width) / float(width) : 0.0f;
    const float shrink = 1.0f / std::sqrt(sum_of_squares(x, width, middle) / float(width) + eps);
    int d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vec v = (load(x + d) - middle) * shrink;
        if (rounds_first) v = rounded<Between<T, Out>>(v);
        store(v * load(scale + d), out + d);
    }
    for (; d < width; d++) {
        const float v = (to_float(x[d]) - middle) * shrink;
        Between<T, Out> rounded;
        from_float(v, &rounded);
        from_float((rounds_first ? to_float(rounded) : v) * scale[d], out + d);
    }
}

// sum = x + added, rounded once
template <class X, class T>
void add_row(const X* x, const T* added, X* sum, int width) {
    int d = 0;
    for (; d + LANES <= width; d += LANES) store(load(x + d) + load(added + d), sum + d);
    for (; d < width; d++) from_float(to_float(x[d]) + to_float(added[d]), sum + d);
}

template <class T, class Out>
void scale_row(const T* x, float scale, Out* out, int width) {
    int d = 0;
    for (; d + LANES <= width; d += LANES) store(load(x + d) * scale, out + d);
    for (; d < width; d++) from_float(to_float(x[d]) * scale, out + d);
}

// Turns pairs of numbers of a head by the angles of its token: (i, i + half) or (2i, 2i + 1). The upper half may have
// angles of its own, `upper` behind those of the lower.
template <class T, class Angle>
void rotate_halves(T* head, const Angle* cos, const Angle* sin, int width, int upper) {
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

template <class T, class Angle>
void rotate_pairs(T* head, const Angle* cos, const Angle* sin, int width) {
    for (int i = 0; i + 1 < width; i += 2) {
        const float even = to_float(head[i]), odd = to_float(head[i + 1]);
        from_float(even * to_float(cos[i]) - odd * to_float(sin[i]), head + i);
        from_float(odd * to_float(cos[i + 1]) + even * to_float(sin[i + 1]), head + i + 1);
    }
}

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2, SIGMOID = 3 };

template <Activation A>
inline Vec activate(Vec x) {
    if constexpr (A == SILU) return gated(x, x);
    if constexpr (A == SIGMOID) return gated(Vec{} + 1.0f, x);
    if constexpr (A == GELU_TANH)  // 0.5 (1 + tanh(u)) is sigmoid(2u)
        return gated(x, 1.5957691216f * (x + 0.044715f * x * x * x));
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

}  // namespace

extern "C" {

// How gates act on the numbers beside them. Named as in protocol.py.
struct Gating {
    float limit, steepness, added;
    int32_t is_cut_after, by_turns, is_plain;
};

// Without a scale there is none. Named as in protocol.py.
struct Norm {
    const float* scale;
    float eps;
    int32_t rounds_first, is_centered;
};

// sum = x + added_scale * after(added), out = before(sum). Rows of all are `width` long and dense. x and the sum are of
// `x_kind`, which is the others' or float32.
struct AddNorm {
    const void* x;
    const void* added;  // null: the sum is x, and not written
    void* sum;
    void* out;           // null: only the sum is wanted
    int64_t rows;
    Norm after, before;
    float added_scale;
    int32_t width, kind, x_kind;
};

struct Gate {
    const void* gate_up;  // [rows, 2 * width], dense
    void* out;            // [rows, width], dense
    int64_t rows;
    Gating gating;
    int32_t width, activation, kind;
};

struct Heads {
    void* tokens;                  // [rows, query heads, then key heads, then more], changed in place
    const float *query_scale, *key_scale;  // of the norms, or null
    const void *cos, *sin;         // [rows, angles], dense; or null
    const float* query_factor;     // [rows], of queries in the end; or null
    int64_t rows, token_stride;    // the stride in elements
    int32_t heads, kv_heads, head_dim;
    int32_t query_norm_width, key_norm_width;  // a head's, or all heads'
    int32_t rotary_dim, angles, in_pairs, rounds_first;  // angles: rotary_dim, or half as many
    float eps;
    int32_t kind, angle_kind;  // angles are of the tokens' kind or float32
};

}  // extern "C"

namespace {

template <class T, class Out>
void norm_row(const T* x, const Norm& norm, Out* out, int width) {
    norm_row(x, norm.scale, out, width, norm.eps, norm.rounds_first, norm.is_centered);
}

template <class X, class T>
void add_norm(const AddNorm& a) {
#pragma omp parallel for schedule(static) if (a.rows * a.width >= WORTH_SHARING)
    for (int64_t row = 0; row < a.rows; row++) {
        const X* sum = static_cast<const X*>(a.x) + row * a.width;
        if (a.added) {
            const T* added = static_cast<const T*>(a.added) + row * a.width;
            X* to = static_cast<X*>(a.sum) + row * a.width;
            // What is between two steps rests where the sum will be, which is never where x is.
            if (a.after.scale) norm_row(added, a.after, to, a.width);
            if (a.added_scale != 1.0f && a.after.scale) scale_row(to, a.added_scale, to, a.width);
            if (a.added_scale != 1.0f && !a.after.scale) scale_row(added, a.added_scale, to, a.width);
            if (a.added_scale != 1.0f || a.after.scale)
                add_row(sum, to, to, a.width);
            else
                add_row(sum, added, to, a.width);
            sum = to;
        }
        T* out = static_cast<T*>(a.out) + row * a.width;
        if (a.out) norm_row(sum, a.before, out, a.width);
    }
}

// A number that is none stays none.
inline Vec at_most(Vec x, float limit) { return x > limit ? Vec{} + limit : x; }

// Each step is rounded to a T, as transformers does it. PLAIN: nothing is cut, steep or added.
template <Activation A, bool PLAIN, class T>
inline void gate_vector(const T* gates, const T* others, T* out, const Gating& how) {
    Vec activated = load(gates), other = load(others);
    if constexpr (PLAIN) {
        activated = activate<A>(activated);
    } else {
        if (!how.is_cut_after) activated = at_most(activated, how.limit);
        if (how.steepness == 1.0f)
            activated = activate<A>(activated);
        else
            activated *= rounded<T>(activate<SIGMOID>(rounded<T>(how.steepness * activated)));
        other = rounded<T>(-at_most(-at_most(other, how.limit), how.limit) + how.added);
    }
    activated = rounded<T>(activated);
    if (!PLAIN && how.is_cut_after) activated = at_most(activated, how.limit);
    store(activated * other, out);
}

template <Activation A, bool PLAIN, class T>
void gate_row(const T* gate_up, T* out, int width, const Gating& how) {
    int d = 0;
    if (!how.by_turns)
        for (; d + LANES <= width; d += LANES)
            gate_vector<A, PLAIN>(gate_up + d, gate_up + width + d, out + d, how);
    // What is left, and what does not lie side by side, is brought together first.
    for (; d < width; d += LANES) {
        T gates[LANES] = {}, others[LANES] = {}, results[LANES];
        const int count = std::min(LANES, width - d);
        for (int i = 0; i < count; i++) {
            gates[i] = how.by_turns ? gate_up[2 * (d + i)] : gate_up[d + i];
            others[i] = how.by_turns ? gate_up[2 * (d + i) + 1] : gate_up[width + d + i];
        }
        gate_vector<A, PLAIN>(gates, others, results, how);
        std::copy(results, results + count, out + d);
    }
}

template <class T>
void gate(const Gate& g) {
    const auto all_rows = [&](auto row_of) {
        const T* from = static_cast<const T*>(g.gate_up);
        T* to = static_cast<T*>(g.out);
#pragma omp parallel for schedule(static) if (g.rows * g.width >= WORTH_SHARING / 4)
        for (int64_t row = 0; row < g.rows; row++)
            row_of(from + row * 2 * g.width, to + row * g.width, g.width, g.gating);
    };
    with_activation(g.activation, [&](auto constant) {
        constexpr Activation A = decltype(constant)::value;
        if (g.gating.is_plain)
            all_rows(gate_row<A, true, T>);
        else
            all_rows(gate_row<A, false, T>);
    });
}

template <class T, class Angle>
void prepare_heads(const Heads& h) {
    const int query_width = h.heads * h.head_dim, key_width = h.kv_heads * h.head_dim;
#pragma omp parallel for schedule(static) if (h.rows * (query_width + key_width) >= WORTH_SHARING)
    for (int64_t t = 0; t < h.rows; t++) {
        T* query = static_cast<T*>(h.tokens) + t * h.token_stride;
        T* key = query + query_width;
        if (h.query_scale)
            for (int d = 0; d < query_width; d += h.query_norm_width)
                norm_row(query + d, h.query_scale, query + d, h.query_norm_width, h.eps, h.rounds_first, false);
        if (h.key_scale)
            for (int d = 0; d < key_width; d += h.key_norm_width)
                norm_row(key + d, h.key_scale, key + d, h.key_norm_width, h.eps, h.rounds_first, false);
        const Angle* cos = static_cast<const Angle*>(h.cos) + t * h.angles;
        const Angle* sin = static_cast<const Angle*>(h.sin) + t * h.angles;
        for (int d = 0; h.cos && d < query_width + key_width; d += h.head_dim)
            if (h.in_pairs)
                rotate_pairs(query + d, cos, sin, h.rotary_dim);
            else
                rotate_halves(query + d, cos, sin, h.rotary_dim, h.angles - h.rotary_dim / 2);
        if (h.query_factor) scale_row(query, h.query_factor[t], query, query_width);
    }
}

}  // namespace

extern "C" {

void intarsia_prepare_heads(const Heads* h) {
    with_kind(h->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        if (h->angle_kind == h->kind)
            prepare_heads<T, T>(*h);
        else
            prepare_heads<T, float>(*h);
    });
}

void intarsia_add_norm(const AddNorm* a) {
    with_kind(a->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        if (a->x_kind == a->kind)
            add_norm<T, T>(*a);
        else
            add_norm<float, T>(*a);
    });
}

void intarsia_gate(const Gate* g) {
    with_kind(g->kind, [&](auto* number) { gate<std::remove_pointer_t<decltype(number)>>(*g); });
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
