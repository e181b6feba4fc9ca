// Which experts a token goes to, and by which shares, on a CPU. Plain C ABI; see routing/cpu.py.
//
// A token is computed by one thread, and each of its sums runs over its experts alone: its bits do not depend on how many
// tokens there are.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "numbers.h"

extern "C" {

// Named as in protocol.py.
struct Routing {
    const void* logits;         // [tokens, count], rows row_stride apart
    const float* bias;          // [count], or null
    const float* expert_scale;  // [count], or null
    int64_t* experts;           // [tokens, most]
    void* shares;               // [tokens, most]
    int64_t tokens, row_stride;
    int32_t count, most, scoring, is_of_chosen, rounds;
    int32_t groups, most_groups, normalizes, kind, shares_kind;
    float least, scale;
};

}  // extern "C"

namespace {

constexpr int MOST_EXPERTS = 1024;
constexpr int64_t WORTH_SHARING = 1 << 16;  // comparisons of which it pays to wake the other threads
constexpr float LOWEST = -std::numeric_limits<float>::infinity(), NONE = std::numeric_limits<float>::quiet_NaN();

enum Scoring { SOFTMAX = 0, SIGMOID = 1, SQRT_SOFTPLUS = 2 };

inline int whole_vectors(int count) { return (count + LANES - 1) / LANES * LANES; }

// Changes logits into scores, in place. There is room for whole vectors.
template <class Rounded>
void score(float* x, int count, int scoring, Rounded rounded) {
    if (scoring == SQRT_SOFTPLUS) {
        for (int i = 0; i < count; i++)
            x[i] = rounded(std::sqrt(rounded(x[i] > 20.0f ? x[i] : std::log1p(std::exp(x[i])))));
        return;
    }
    if (scoring == SIGMOID) {
        for (int i = 0; i < count; i += LANES) store(gated(Vec{} + 1.0f, load(x + i)), x + i);
        std::transform(x, x + count, x, rounded);
        return;
    }
    float most = LOWEST;
    for (int i = 0; i < count; i++) most = std::max(most, x[i]);
    std::fill(x + count, x + whole_vectors(count), LOWEST);
    Vec total = {};
    for (int i = 0; i < count; i += LANES) {
        const Vec power = two_to((load(x + i) - most) * 1.44269504f);
        store(power, x + i);
        total += power;
    }
    const float sum_of_all = sum(total);
    for (int i = 0; i < count; i++) x[i] = rounded(x[i] / sum_of_all);
}

// The place of the greatest, the first of equal ones. What is NONE has been taken, or fills the last vector.
inline int best_of(const float* x, int count) {
    typedef int32_t Places __attribute__((vector_size(4 * LANES)));
    Vec most = Vec{} + LOWEST;
    Places at = Places{} - 1, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < count; i += LANES, here += LANES) {
        const Vec v = load(x + i);
        const Places is_greater = v > most;
        most = is_greater ? v : most;
        at = is_greater ? here : at;
    }
    int best = -1;
    for (int lane = 0; lane < LANES; lane++) {
        const int place = at[lane];
        if (place >= 0 && (best < 0 || x[place] > x[best] || (x[place] == x[best] && place < best))) best = place;
    }
    for (int i = 0; best < 0 && i < count; i++)
        if (!std::isnan(x[i])) best = i;  // nothing is left but what is lowest
    return best;
}

// Leaves the experts of the best groups alone.
void choose_groups(float* choice, int count, int groups, int most) {
    const int size = count / groups;
    float worth[MOST_EXPERTS + LANES];
    std::fill(worth + groups, worth + whole_vectors(groups), NONE);
    for (int g = 0; g < groups; g++) {
        float first = LOWEST, second = LOWEST;
        for (int i = g * size; i < (g + 1) * size; i++) {
            second = std::max(second, std::min(first, choice[i]));
            first = std::max(first, choice[i]);
        }
        worth[g] = first + second;
    }
    bool is_chosen[MOST_EXPERTS] = {};
    for (int i = 0; i < most; i++) {
        const int g = best_of(worth, groups);
        if (g < 0) break;
        is_chosen[g] = true;
        worth[g] = NONE;
    }
    for (int g = 0; g < groups; g++)
        if (!is_chosen[g]) std::fill(choice + g * size, choice + (g + 1) * size, LOWEST);
}

template <class T, class Share>
void route_token(const Routing& r, int64_t token) {
    alignas(64) float scores[MOST_EXPERTS + LANES], choice[MOST_EXPERTS + LANES], shares[MOST_EXPERTS + LANES];
    const T* logits = static_cast<const T*>(r.logits) + token * r.row_stride;
    int64_t* experts = r.experts + token * r.most;
    for (int i = 0; i < r.count; i++) scores[i] = to_float(logits[i]);
    const auto rounded = [&](float x) {
        if (!r.rounds) return x;
        T narrow;
        from_float(x, &narrow);
        return to_float(narrow);
    };
    if (!r.is_of_chosen) score(scores, r.count, r.scoring, rounded);
    // What they are chosen by. What is no number is the greatest: its answer will be none either.
    for (int i = 0; i < r.count; i++) {
        const float value = scores[i] + (r.bias ? r.bias[i] : 0.0f);
        choice[i] = std::isnan(value) ? std::numeric_limits<float>::infinity() : value;
    }
    std::fill(choice + r.count, choice + whole_vectors(r.count), NONE);
    if (r.groups > 1) choose_groups(choice, r.count, r.groups, r.most_groups);
    // One after another, the best is taken.
    for (int k = 0; k < r.most; k++) {
        const int best = best_of(choice, r.count);
        experts[k] = best;
        shares[k] = scores[best];
        choice[best] = NONE;
    }
    // Shares are made of the scores of those.
    if (r.is_of_chosen) score(shares, r.most, r.scoring, rounded);
    if (r.normalizes) {
        float total = 0.0f;
        for (int k = 0; k < r.most; k++) total += shares[k];
        total = rounded(rounded(total) + r.least);
        for (int k = 0; k < r.most; k++) shares[k] = rounded(shares[k] / total);
    }
    Share* to = static_cast<Share*>(r.shares) + token * r.most;
    for (int k = 0; k < r.most; k++)
        from_float(rounded(shares[k] * r.scale) * (r.expert_scale ? r.expert_scale[experts[k]] : 1.0f), to + k);
}

}  // namespace

extern "C" {

void intarsia_route(const Routing* r) {
    with_kind(r->kind, [&](auto* number) {
        with_kind(r->shares_kind, [&](auto* share) {
            using T = std::remove_pointer_t<decltype(number)>;
            using Share = std::remove_pointer_t<decltype(share)>;
#pragma omp parallel for schedule(static) if (r->tokens * r->count * r->most >= WORTH_SHARING)
            for (int64_t token = 0; token < r->tokens; token++) route_token<T, Share>(*r, token);
        });
    });
}

}  // extern "C"
