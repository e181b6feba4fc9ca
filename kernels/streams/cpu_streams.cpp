// Residual streams of a token become one vector, on a CPU. Plain C ABI; see streams/cpu.py.
//
// A token is computed by one thread, and each of its sums runs over the widths alone: its bits do not depend on how many
// tokens there are.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "numbers.h"

extern "C" {

struct Streams {
    const void* streams;  // [tokens, count, channels], dense
    const float* product;  // [weights, count * channels], dense
    const float* base;  // [weights]
    const float* scale;  // [1] or [3]
    void* collapsed;  // [tokens, channels]
    float* after;  // [tokens, count]; null where the streams become one for good
    float* mixed;  // [tokens, count, count]
    int64_t tokens;
    int32_t count, channels, rounds, kind;
    float norm_eps, eps;
};

}  // extern "C"

namespace {

constexpr int MOST_STREAMS = 8, MOST_WEIGHTS = (2 + MOST_STREAMS) * MOST_STREAMS;
constexpr int AT_ONCE = 4;  // rows of the product that meet a token's numbers together
constexpr int64_t WORTH_SHARING = 1 << 15;  // multiplications of which it pays to wake the other threads

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// sums[i] = rows[i] . x, for `here` rows that follow each other
template <class T>
void products(const T* x, const float* rows, int width, int here, float* sums) {
    Vec totals[AT_ONCE] = {};
    int d = 0;
    for (; d + LANES <= width; d += LANES) {
        const Vec v = load(x + d);
        for (int i = 0; i < here; i++) totals[i] += v * load(rows + int64_t(i) * width + d);
    }
    for (int i = 0; i < here; i++) {
        sums[i] = sum(totals[i]);
        for (int rest = d; rest < width; rest++) sums[i] += to_float(x[rest]) * rows[int64_t(i) * width + rest];
    }
}

// Rows sum up to 1, then columns and rows by turns: logits become a mixture of `n` streams.
void balance(float* mixed, int n, int rounds, float eps) {
    for (int row = 0; row < n; row++) {
        float* m = mixed + row * n;
        const float most = *std::max_element(m, m + n);
        float total = 0.0f;
        for (int i = 0; i < n; i++) total += m[i] = std::exp(m[i] - most);
        for (int i = 0; i < n; i++) m[i] = m[i] / total + eps;
    }
    const auto divide = [&](int step, int stride) {  // step: between those that sum up
        for (int line = 0; line < n; line++) {
            float total = 0.0f;
            for (int i = 0; i < n; i++) total += mixed[line * stride + i * step];
            for (int i = 0; i < n; i++) mixed[line * stride + i * step] /= total + eps;
        }
    };
    divide(n, 1);
    for (int round = 1; round < rounds; round++) {
        divide(1, n);
        divide(n, 1);
    }
}

template <class T>
void collapse_token(const Streams& s, int64_t token) {
    const int n = s.count, width = n * s.channels, weights = s.after ? (2 + n) * n : n;
    const T* x = static_cast<const T*>(s.streams) + token * width;
    float logits[MOST_WEIGHTS];
    for (int m = 0; m < weights; m += AT_ONCE)
        products(x, s.product + int64_t(m) * width, width, std::min(AT_ONCE, weights - m), logits + m);
    const float shrink = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + s.norm_eps);
    for (int m = 0; m < weights; m++) logits[m] = logits[m] * shrink * s.scale[std::min(m / n, 2)] + s.base[m];
    // How they become one.
    float before[MOST_STREAMS];
    for (int i = 0; i < n; i++) before[i] = sigmoid(logits[i]) + s.eps;
    T* to = static_cast<T*>(s.collapsed) + token * s.channels;
    int c = 0;
    for (; c + LANES <= s.channels; c += LANES) {
        Vec total = {};
        for (int i = 0; i < n; i++) total += before[i] * load(x + i * s.channels + c);
        store(total, to + c);
    }
    for (; c < s.channels; c++) {
        float total = 0.0f;
        for (int i = 0; i < n; i++) total += before[i] * to_float(x[i * s.channels + c]);
        from_float(total, to + c);
    }
    if (!s.after) return;
    // What comes back, and to which.
    for (int i = 0; i < n; i++) s.after[token * n + i] = 2.0f * sigmoid(logits[n + i]);
    float* mixed = s.mixed + token * n * n;
    std::copy(logits + 2 * n, logits + weights, mixed);
    balance(mixed, n, s.rounds, s.eps);
}

}  // namespace

extern "C" {

void intarsia_collapse_streams(const Streams* s) {
    with_kind(s->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const int64_t each = int64_t(s->count) * s->channels * (s->after ? (2 + s->count) * s->count : s->count);
#pragma omp parallel for schedule(static) if (s->tokens * each >= WORTH_SHARING)
        for (int64_t token = 0; token < s->tokens; token++) collapse_token<T>(*s, token);
    });
}

}  // extern "C"
