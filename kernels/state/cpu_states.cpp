// Recurrences over states in pages, on a CPU, each state in place. Plain C ABI; see state/native.py.
//
// Work is cut into parts of a state that no other part depends on: some values of one head, or some channels. What they
// need of it stays in registers while a token passes. Arithmetic is in float32, as in state/reference.py.
//
// A piece is [start, start + length) of the packed tokens, from page `page`, or from zeros; its last state also goes to
// `saved_to`, unless that is negative.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "numbers.h"

extern "C" {

struct Pieces {
    const int64_t *start, *length, *page, *is_new, *saved_to;  // [count]
    int64_t count;
};

struct Heads {  // pieces of one token
    Pieces pieces;
    const float *q, *k, *v, *g, *beta;  // [T, H, K], [T, H, K], [T, H, V], [T, H], [T, H] or null: no delta
    float* out;                         // [T, H, V] dense
    void* pages;                        // [pages, H, K, V] dense within a page
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, g_token, g_head, beta_token, beta_head, page_stride;
    int32_t heads, keys, values, kind;
};

struct Scan {  // pieces of any length
    Pieces pieces;
    const float *A, *x, *dt, *B, *C;  // [C, S], [T, C], [T, C], [T, S], [T, S]
    float* out;                       // [T, C] dense
    void* pages;                      // [pages, C, S] dense within a page
    int64_t x_token, dt_token, B_token, C_token, page_stride;
    int32_t channels, states, kind;
};

struct Convolution {  // pieces of any length
    Pieces pieces;
    const void *weight, *bias, *x;  // [C, window + 1], [C], [T, C]
    void *out, *pages;              // [T, C] dense, [pages, C, window] dense within a page
    int64_t x_token, page_stride;
    int32_t channels, window, kind;
};

}  // extern "C"

namespace {

constexpr int BLOCK = 4 * LANES;  // values of a head, or channels, that a thread takes at a time
constexpr int64_t WORTH_THREADS = 1 << 15;  // numbers of states; below, waking threads takes longer than the work

// One token of one head, values [from, from + 16 * B).
template <int B, bool DELTA, class T>
inline void head_step(const Heads& a, const float* q, const float* k, const float* v, float decay, float beta,
                      const T* old, T* state, T* saved, float* out) {
    const int64_t row = a.values;
    Vec added[B], result[B] = {};
    for (int b = 0; b < B; b++) added[b] = load(v + b * LANES);
    if (DELTA) {
        Vec known[B] = {};
        if (old)
            for (int i = 0; i < a.keys; i++)
                for (int b = 0; b < B; b++) known[b] += k[i] * load(old + i * row + b * LANES);
        for (int b = 0; b < B; b++) added[b] = beta * (added[b] - decay * known[b]);
    }
    for (int i = 0; i < a.keys; i++)
        for (int b = 0; b < B; b++) {
            Vec s = k[i] * added[b];
            if (old) s += decay * load(old + i * row + b * LANES);
            store(s, state + i * row + b * LANES);
            if (saved) store(s, saved + i * row + b * LANES);
            result[b] += q[i] * s;
        }
    for (int b = 0; b < B; b++) store(result[b], out + b * LANES);
}

// The same for the values that fill no vector.
template <class T>
inline void head_rest(const Heads& a, const float* q, const float* k, const float* v, float decay, float beta,
                      const T* old, T* state, T* saved, float* out, int count) {
    for (int d = 0; d < count; d++) {
        float added = v[d], result = 0;
        if (a.beta) {
            float known = 0;
            for (int i = 0; old && i < a.keys; i++) known += k[i] * to_float(old[i * a.values + d]);
            added = beta * (added - decay * known);
        }
        for (int i = 0; i < a.keys; i++) {
            const float s = k[i] * added + (old ? decay * to_float(old[i * a.values + d]) : 0.0f);
            from_float(s, state + i * a.values + d);
            if (saved) from_float(s, saved + i * a.values + d);
            result += q[i] * s;
        }
        out[d] = result;
    }
}

template <bool DELTA, class T>
void heads(const Heads& a) {
    const int64_t size = int64_t(a.keys) * a.values, work = a.pieces.count * a.heads;
#pragma omp parallel for schedule(static) if (work * size > WORTH_THREADS)
    for (int64_t n = 0; n < work; n++) {
        const int64_t piece = n / a.heads, head = n % a.heads, token = a.pieces.start[piece];
        T* pages = static_cast<T*>(a.pages) + head * size;
        T* state = pages + a.pieces.page[piece] * a.page_stride;
        const int64_t to = a.pieces.saved_to[piece];
        T* saved = to < 0 ? nullptr : pages + to * a.page_stride;
        const T* old = a.pieces.is_new[piece] ? nullptr : state;
        const float *q = a.q + token * a.q_token + head * a.q_head, *k = a.k + token * a.k_token + head * a.k_head;
        const float* v = a.v + token * a.v_token + head * a.v_head;
        float* out = a.out + (token * a.heads + head) * a.values;
        const float decay = std::exp(a.g[token * a.g_token + head * a.g_head]);
        const float beta = DELTA ? a.beta[token * a.beta_token + head * a.beta_head] : 0.0f;
        auto at = [](auto* p, int d) { return p ? p + d : nullptr; };
        int d = 0;
        for (; d + BLOCK <= a.values; d += BLOCK)
            head_step<4, DELTA, T>(a, q, k, v + d, decay, beta, at(old, d), state + d, at(saved, d), out + d);
        for (; d + LANES <= a.values; d += LANES)
            head_step<1, DELTA, T>(a, q, k, v + d, decay, beta, at(old, d), state + d, at(saved, d), out + d);
        head_rest<T>(a, q, k, v + d, decay, beta, at(old, d), state + d, at(saved, d), out + d, a.values - d);
    }
}

template <class T>
void scan(const Scan& a) {
    const int64_t blocks = (a.channels + LANES - 1) / LANES;
    int64_t tokens = 0;
    for (int64_t n = 0; n < a.pieces.count; n++) tokens += a.pieces.length[n];
#pragma omp parallel for schedule(dynamic) if (tokens * a.channels * a.states > WORTH_THREADS)
    for (int64_t work = 0; work < a.pieces.count * blocks; work++) {
        std::vector<float> held;
        const int64_t piece = work / blocks, first = work % blocks * LANES;
        const int64_t last = std::min<int64_t>(first + LANES, a.channels), to = a.pieces.saved_to[piece];
        T* pages = static_cast<T*>(a.pages) + first * a.states;
        T* state = pages + a.pieces.page[piece] * a.page_stride;
        const int64_t size = (last - first) * a.states;
        held.resize(size);
        for (int64_t i = 0; i < size; i++) held[i] = a.pieces.is_new[piece] ? 0.0f : to_float(state[i]);
        for (int64_t t = a.pieces.start[piece]; t < a.pieces.start[piece] + a.pieces.length[piece]; t++) {
            const float *B = a.B + t * a.B_token, *C = a.C + t * a.C_token;
            for (int64_t c = first; c < last; c++) {
                const float dt = a.dt[t * a.dt_token + c], added = dt * a.x[t * a.x_token + c];
                const float* A = a.A + c * a.states;
                float* s = held.data() + (c - first) * a.states;
                float result = 0;
                for (int i = 0; i < a.states; i++) {
                    s[i] = std::exp(dt * A[i]) * s[i] + added * B[i];
                    result += s[i] * C[i];
                }
                a.out[t * a.channels + c] = result;
            }
        }
        for (int64_t i = 0; i < size; i++) from_float(held[i], state + i);
        if (to >= 0) std::copy(state, state + size, pages + to * a.page_stride);
    }
}

template <class T>
void convolve(const Convolution& a) {
    const int64_t blocks = (a.channels + BLOCK - 1) / BLOCK;
    const int width = a.window + 1;
    int64_t tokens = 0;
    for (int64_t n = 0; n < a.pieces.count; n++) tokens += a.pieces.length[n];
#pragma omp parallel for schedule(dynamic) if (tokens * a.channels * width > WORTH_THREADS)
    for (int64_t work = 0; work < a.pieces.count * blocks; work++) {
        const int64_t piece = work / blocks, first = work % blocks * BLOCK;
        const int count = int(std::min<int64_t>(BLOCK, a.channels - first));
        const int64_t start = a.pieces.start[piece], length = a.pieces.length[piece], to = a.pieces.saved_to[piece];
        const T* x = static_cast<const T*>(a.x) + first;
        const T* weight = static_cast<const T*>(a.weight) + first * width;
        const T* bias = static_cast<const T*>(a.bias) + first;
        T* state = static_cast<T*>(a.pages) + a.pieces.page[piece] * a.page_stride + first * a.window;
        if (a.pieces.is_new[piece]) std::memset(static_cast<void*>(state), 0, sizeof(T) * count * a.window);
        float weights[BLOCK], sums[BLOCK];
        for (int64_t t = 0; t < length; t++) {
            for (int c = 0; c < count; c++) sums[c] = to_float(bias[c]);
            for (int w = 0; w < width; w++) {
                const int64_t back = t + w - a.window;
                for (int c = 0; c < count; c++) weights[c] = to_float(weight[c * width + w]);
                if (back >= 0) {
                    const T* seen = x + (start + back) * a.x_token;
                    for (int c = 0; c < count; c++) sums[c] += weights[c] * to_float(seen[c]);
                } else {
                    for (int c = 0; c < count; c++) sums[c] += weights[c] * to_float(state[c * a.window + a.window + back]);
                }
            }
            T* out = static_cast<T*>(a.out) + (start + t) * a.channels + first;
            for (int c = 0; c < count; c++) from_float(sums[c], out + c);
        }
        T* saved = to < 0 ? nullptr : static_cast<T*>(a.pages) + to * a.page_stride + first * a.window;
        for (int c = 0; c < count; c++)
            for (int w = 0; w < a.window; w++) {  // what is read lies further on than what is written
                const int64_t back = length - a.window + w;
                state[c * a.window + w] =
                    back >= 0 ? x[(start + back) * a.x_token + c] : state[c * a.window + w + length];
                if (saved) saved[c * a.window + w] = state[c * a.window + w];
            }
    }
}

}  // namespace

extern "C" {

void intarsia_heads(const Heads* a) {
    with_kind(a->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        a->beta ? heads<true, T>(*a) : heads<false, T>(*a);
    });
}

void intarsia_scan(const Scan* a) {
    with_kind(a->kind, [&](auto* number) { scan<std::remove_pointer_t<decltype(number)>>(*a); });
}

void intarsia_convolve(const Convolution* a) {
    with_kind(a->kind, [&](auto* number) { convolve<std::remove_pointer_t<decltype(number)>>(*a); });
}

}  // extern "C"
