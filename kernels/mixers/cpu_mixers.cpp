// What a state mixer does to each token by itself around its recurrence, on a CPU. Plain C ABI; see mixers/cpu.py.
//
// A token's numbers are computed by the same instructions whatever is beside it: lanes are independent, and what is
// summed comes in one order.

#include <type_traits>
#include <vector>

#include "elementwise.h"

extern "C" {

struct DeltaInputs {
    const void *qkv, *a, *b;      // [T, KH * K, then as much, then H * V], [T, D], [T, H]
    const float *A, *bias;        // [D], [D]
    float *q, *k, *v, *g, *beta;  // dense
    int64_t qkv_token, a_token, b_token, tokens;
    int32_t key_heads, keys, heads, values, decays;
    float least, query_scale;  // least: of a logarithm of decay, or 0
    int32_t kind;
};

struct Mamba2Inputs {
    const void *xBC, *dt;    // [T, H * V, then G * K, then as much], [T, H]
    const float *A, *bias;   // [H], [H]
    float *q, *k, *v, *g;    // dense
    int64_t xBC_token, dt_token, tokens;
    int32_t heads, values, groups, keys;
    float shortest, longest;  // time steps
    int32_t kind;
};

struct LruInputs {
    const void *x, *input, *forget;  // [T, C] each
    const float* rate;               // [C]
    const int64_t* positions;        // [T]
    float *out, *g;                  // [T, C] dense
    int64_t x_token, input_token, forget_token, tokens;
    int32_t channels, kind;
};

struct Map {  // out = f(x), or f(x) * factor
    const void *x, *factor;  // [T, C], [T, C] or null
    void* out;               // [T, C] dense, float32 where there is no factor
    int64_t x_token, factor_token, tokens;
    int32_t channels, function, kind;
};

struct GatedNorm {
    const float* y;           // [T, C] dense
    const void *gate, *skip;  // [T, C], [T, C] or null
    const float *weight, *D;  // [C] or null, [C] or null
    void* out;                // [T, C] dense
    int64_t gate_token, skip_token, tokens;
    int32_t channels, width, order, rounds, gate_function;  // width: of what is normed together
    float eps;
    int32_t kind;
};

}  // extern "C"

namespace {

constexpr int64_t WORTH_SHARING = 1 << 14;  // numbers of which it pays to wake the other threads
// Both numbered as in protocol.py.
enum Order { NO_NORM = 0, NORM_FIRST = 1, GATE_FIRST = 2 };
enum Function { SOFTPLUS = 0, SILU = 1, SIGMOID = 2 };

float sum_of(Lanes v) {
    float lanes[WIDTH], total = 0;
    store_lanes(v, lanes);
    for (float lane : lanes) total += lane;
    return total;
}

template <class T>
void to_floats(const T* from, float* to, int count) {
    for (int i = 0; i < count; i += WIDTH) store_some(load_some(from + i, count - i), to + i, count - i);
}

// Each head of a token divided by its length, and times `scale`.
template <class T>
void unit_heads(const T* from, float* to, int heads, int width, float scale) {
    for (; heads > 0; heads--, from += width, to += width) {
        Lanes squares = {};
        for (int i = 0; i < width; i += WIDTH) {
            const Lanes x = load_some(from + i, width - i);
            squares = fused(x, x, squares);
        }
        const Lanes shrink = all_lanes(1.0f / std::sqrt(sum_of(squares) + 1e-6f));
        for (int i = 0; i < width; i += WIDTH)
            store_some(load_some(from + i, width - i) * shrink * scale, to + i, width - i);
    }
}

template <class T>
void delta_inputs(const DeltaInputs& d) {
    const int keys = d.key_heads * d.keys, values = d.heads * d.values;
#pragma omp parallel for schedule(static) if (d.tokens * (2 * keys + values) > WORTH_SHARING)
    for (int64_t t = 0; t < d.tokens; t++) {
        const T* qkv = static_cast<const T*>(d.qkv) + t * d.qkv_token;
        unit_heads(qkv, d.q + t * keys, d.key_heads, d.keys, d.query_scale);
        unit_heads(qkv + keys, d.k + t * keys, d.key_heads, d.keys, 1.0f);
        to_floats(qkv + 2 * keys, d.v + t * values, values);
        for (int h = 0; h < d.heads; h += WIDTH) {
            const int count = d.heads - h;
            const Lanes b = load_some(static_cast<const T*>(d.b) + t * d.b_token + h, count);
            store_some(sigmoid(b), d.beta + t * d.heads + h, count);
        }
        for (int i = 0; i < d.decays; i += WIDTH) {
            const int count = d.decays - i;
            const Lanes a = load_some(static_cast<const T*>(d.a) + t * d.a_token + i, count);
            const Lanes shifted = a + load_some(d.bias + i, count), A = load_some(d.A + i, count);
            const Lanes g = d.least != 0 ? all_lanes(d.least) * sigmoid(-A * shifted) : A * softplus(shifted);
            store_some(g, d.g + t * d.decays + i, count);
        }
    }
}

template <class T>
void mamba2_inputs(const Mamba2Inputs& m) {
    const int shared = m.groups * m.keys, inner = m.heads * m.values, padded = (m.heads + WIDTH - 1) / WIDTH * WIDTH;
#pragma omp parallel if (m.tokens * (2 * shared + inner) > WORTH_SHARING)
    {
        std::vector<float> steps(padded);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < m.tokens; t++) {
            const T* xBC = static_cast<const T*>(m.xBC) + t * m.xBC_token;
            for (int h = 0; h < m.heads; h += WIDTH) {
                const int count = m.heads - h;
                const Lanes dt = load_some(static_cast<const T*>(m.dt) + t * m.dt_token + h, count);
                Lanes step = softplus(dt + load_some(m.bias + h, count));
                step = step < m.shortest ? all_lanes(m.shortest) : step;
                step = step > m.longest ? all_lanes(m.longest) : step;
                store_lanes(step, steps.data() + h);
                store_some(step * load_some(m.A + h, count), m.g + t * m.heads + h, count);
            }
            for (int h = 0; h < m.heads; h++)
                for (int i = 0; i < m.values; i += WIDTH) {
                    const int at = h * m.values + i, count = m.values - i;
                    store_some(load_some(xBC + at, count) * steps[h], m.v + t * inner + at, count);
                }
            to_floats(xBC + inner, m.k + t * shared, shared);
            to_floats(xBC + inner + shared, m.q + t * shared, shared);
        }
    }
}

inline Lanes square_root(Lanes v) {
    float lanes[WIDTH];
    store_lanes(v, lanes);
    for (float& lane : lanes) lane = std::sqrt(lane);
    return load_lanes(lanes);
}

template <class T>
void lru_inputs(const LruInputs& m) {
#pragma omp parallel for schedule(static) if (m.tokens * m.channels > WORTH_SHARING)
    for (int64_t t = 0; t < m.tokens; t++)
        for (int i = 0; i < m.channels; i += WIDTH) {
            const int count = m.channels - i;
            const Lanes x = load_some(static_cast<const T*>(m.x) + t * m.x_token + i, count);
            const Lanes input = sigmoid(load_some(static_cast<const T*>(m.input) + t * m.input_token + i, count));
            const Lanes forget = sigmoid(load_some(static_cast<const T*>(m.forget) + t * m.forget_token + i, count));
            const Lanes g = load_some(m.rate + i, count) * rounded<T>(forget);
            const Lanes share = m.positions[t] ? square_root(1.0f - exponential(g + g)) : all_lanes(1.0f);
            store_some(rounded<T>(x * rounded<T>(input)) * share, m.out + t * m.channels + i, count);
            store_some(g, m.g + t * m.channels + i, count);
        }
}

inline Lanes gate_of(const GatedNorm& n, Lanes x) { return n.gate_function == SIGMOID ? sigmoid(x) : silu(x); }

// Channels [first, first + width) of a token, which are normed together. room: [width, padded]
template <class T>
void norm_group(const GatedNorm& n, int64_t t, int first, float* room) {
    const T *gate = static_cast<const T*>(n.gate) + t * n.gate_token + first, *skip = nullptr;
    if (n.skip) skip = static_cast<const T*>(n.skip) + t * n.skip_token + first;
    const float* y = n.y + t * n.channels + first;
    Lanes squares = {};
    for (int i = 0; i < n.width; i += WIDTH) {
        const int count = n.width - i;
        Lanes x = load_some(y + i, count);
        if (skip) x = fused(load_some(n.D + first + i, count), load_some(skip + i, count), x);
        if (n.rounds) x = rounded<T>(x);
        if (n.order != NORM_FIRST) x *= gate_of(n, load_some(gate + i, count));
        squares = fused(x, x, squares);
        store_lanes(x, room + i);
    }
    const Lanes shrink = all_lanes(1.0f / std::sqrt(sum_of(squares) / float(n.width) + n.eps));
    T* out = static_cast<T*>(n.out) + t * n.channels + first;
    for (int i = 0; i < n.width; i += WIDTH) {
        const int count = n.width - i;
        Lanes x = load_lanes(room + i);
        if (n.order != NO_NORM) {
            x *= shrink;
            if (n.rounds) x = rounded<T>(x);
            x *= load_some(n.weight + first + i, count);
            if (n.rounds) x = rounded<T>(x);
        }
        if (n.order == NORM_FIRST) x *= gate_of(n, load_some(gate + i, count));
        store_some(x, out + i, count);
    }
}

template <class T>
void gated_norm(const GatedNorm& n) {
    const int groups = n.channels / n.width;
#pragma omp parallel if (n.tokens * n.channels > WORTH_SHARING)
    {
        std::vector<float> room(n.width + WIDTH);
#pragma omp for schedule(static)
        for (int64_t work = 0; work < n.tokens * groups; work++)
            norm_group<T>(n, work / groups, int(work % groups) * n.width, room.data());
    }
}

// What transformers computes in the model's dtype is rounded to it.
template <class T>
void map(const Map& m) {
#pragma omp parallel for schedule(static) if (m.tokens * m.channels > WORTH_SHARING)
    for (int64_t t = 0; t < m.tokens; t++)
        for (int i = 0; i < m.channels; i += WIDTH) {
            const int count = m.channels - i;
            const int64_t at = t * m.channels + i;
            const Lanes x = load_some(static_cast<const T*>(m.x) + t * m.x_token + i, count);
            Lanes y = m.function == SOFTPLUS ? softplus(x) : rounded<T>(m.function == SILU ? silu(x) : sigmoid(x));
            if (m.factor) {
                y *= load_some(static_cast<const T*>(m.factor) + t * m.factor_token + i, count);
                store_some(y, static_cast<T*>(m.out) + at, count);
            } else {
                store_some(y, static_cast<float*>(m.out) + at, count);
            }
        }
}

}  // namespace

extern "C" {

void intarsia_map(const Map* m) {
    with_kind(m->kind, [&](auto* number) { map<std::remove_pointer_t<decltype(number)>>(*m); });
}

void intarsia_delta_inputs(const DeltaInputs* d) {
    with_kind(d->kind, [&](auto* number) { delta_inputs<std::remove_pointer_t<decltype(number)>>(*d); });
}

void intarsia_mamba2_inputs(const Mamba2Inputs* m) {
    with_kind(m->kind, [&](auto* number) { mamba2_inputs<std::remove_pointer_t<decltype(number)>>(*m); });
}

void intarsia_lru_inputs(const LruInputs* m) {
    with_kind(m->kind, [&](auto* number) { lru_inputs<std::remove_pointer_t<decltype(number)>>(*m); });
}

void intarsia_gated_norm(const GatedNorm* n) {
    with_kind(n->kind, [&](auto* number) { gated_norm<std::remove_pointer_t<decltype(number)>>(*n); });
}

}  // extern "C"
