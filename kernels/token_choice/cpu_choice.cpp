// Which tokens queries attend to, by an index, on a CPU. Plain C ABI; see token_choice/cpu.py.
//
// A score is summed in one order, given by the query and the key alone: the numbers of a key from first to last in the
// lanes of keys, then the index heads from first to last. Of tokens that score alike the older one is taken. So the same
// tokens are chosen whatever is computed beside a query, on one thread as on many.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "functions.h"

extern "C" {

struct Choice {
    const void *query, *keys;       // [N, I, E] dense, [pages, tokens, E], its last axis dense
    const float* weights;           // [N, I] dense
    const int64_t *table, *positions;  // [rows, pages of a row], [N]
    int64_t* chosen;                // [N, most]
    int64_t page_stride, token_stride;  // in numbers
    int32_t queries, rows, heads, size, table_width, block_tokens, most, kind;
};

}  // extern "C"

namespace {

constexpr int KEYS = WIDTH;       // keys that are scored together
constexpr int QUERIES = 4;        // of a row, that read keys together
constexpr int64_t WORTH_SHARING = 1 << 20;  // products, at most, of which it pays to wake the other threads

// Lanes are keys, so that what is summed has one order: [E][KEYS], zeros where there are no keys.
template <class T>
void gather(const Choice& c, const int64_t* table, int start, int count, float* to) {
    for (int k = 0; k < KEYS; k++) {
        if (k >= count) {
            for (int e = 0; e < c.size; e++) to[e * KEYS + k] = 0;
            continue;
        }
        const int position = start + k;
        const T* key = static_cast<const T*>(c.keys) + table[position / c.block_tokens] * c.page_stride +
                       position % c.block_tokens * c.token_stride;
        for (int e = 0; e < c.size; e++) to[e * KEYS + k] = to_float(key[e]);
    }
}

Lanes score(const Choice& c, const float* query, const float* weights, const float* keys) {
    Lanes total = all_lanes(0);
    int h = 0;
    for (; h + 4 <= c.heads; h += 4) {  // four sums at a time: one would wait for itself
        const float* q = query + int64_t(h) * c.size;
        Lanes a = all_lanes(0), b = a, d = a, f = a;
        for (int e = 0; e < c.size; e++) {
            const Lanes key = load_lanes(keys + e * KEYS);
            a = fused(all_lanes(q[e]), key, a);
            b = fused(all_lanes(q[c.size + e]), key, b);
            d = fused(all_lanes(q[2 * c.size + e]), key, d);
            f = fused(all_lanes(q[3 * c.size + e]), key, f);
        }
        const Lanes zero = all_lanes(0);
        total = fused(all_lanes(weights[h]), larger(a, zero), total);
        total = fused(all_lanes(weights[h + 1]), larger(b, zero), total);
        total = fused(all_lanes(weights[h + 2]), larger(d, zero), total);
        total = fused(all_lanes(weights[h + 3]), larger(f, zero), total);
    }
    for (; h < c.heads; h++) {
        const float* q = query + int64_t(h) * c.size;
        Lanes a = all_lanes(0);
        for (int e = 0; e < c.size; e++) a = fused(all_lanes(q[e]), load_lanes(keys + e * KEYS), a);
        total = fused(all_lanes(weights[h]), larger(a, all_lanes(0)), total);
    }
    return total;
}

// The best of the first `seen` scores, in their order.
void take_best(const float* scores, int seen, int most, std::vector<int32_t>& order, int64_t* chosen) {
    const int count = std::min(seen, most);
    order.resize(seen);
    for (int n = 0; n < seen; n++) order[n] = n;
    if (seen > most) {
        // NaN comes last, so that the order is one.
        const auto of = [&](int32_t n) { return std::isnan(scores[n]) ? -INFINITY : scores[n]; };
        const auto better = [&](int32_t a, int32_t b) { return of(a) > of(b) || (of(a) == of(b) && a < b); };
        std::nth_element(order.begin(), order.begin() + most, order.end(), better);
        std::sort(order.begin(), order.begin() + most);
    }
    for (int n = 0; n < count; n++) chosen[n] = order[n];
    std::fill(chosen + count, chosen + most, 0);
}

template <class T>
void choose(const Choice& c) {
    const int each = c.queries / c.rows, per_row = (each + QUERIES - 1) / QUERIES;
    const int64_t longest_of_all = *std::max_element(c.positions, c.positions + c.queries) + 1;
    const bool is_shared = longest_of_all * c.queries * c.heads * c.size >= WORTH_SHARING;
#pragma omp parallel if (is_shared)
    {
        std::vector<float> keys(int64_t(c.size) * KEYS), query(int64_t(QUERIES) * c.heads * c.size), scores;
        std::vector<int32_t> order;
#pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < c.rows * per_row; item++) {
            const int row = item / per_row, first = row * each + item % per_row * QUERIES;
            const int count = std::min(QUERIES, (row + 1) * each - first);
            int longest = 0;
            for (int n = 0; n < count; n++) longest = std::max(longest, int(c.positions[first + n]) + 1);
            // Who sees no more than it may choose, chooses all.
            const int64_t width = (longest + KEYS - 1) / KEYS * KEYS;
            scores.resize(count * width);
            const int64_t numbers = int64_t(c.heads) * c.size;
            const T* from = static_cast<const T*>(c.query) + first * numbers;
            for (int64_t i = 0; i < count * numbers; i++) query[i] = to_float(from[i]);
            for (int start = 0; longest > c.most && start < longest; start += KEYS) {
                gather<T>(c, c.table + int64_t(row) * c.table_width, start, std::min(KEYS, longest - start), keys.data());
                for (int n = 0; n < count; n++)
                    store_lanes(score(c, &query[n * numbers], c.weights + int64_t(first + n) * c.heads, keys.data()),
                                &scores[n * width + start]);
            }
            for (int n = 0; n < count; n++)
                take_best(&scores[n * width], int(c.positions[first + n]) + 1, c.most, order,
                          c.chosen + int64_t(first + n) * c.most);
        }
    }
}

}  // namespace

extern "C" {

void intarsia_choose(const Choice* c) {
    with_kind(c->kind, [&](auto* number) { choose<std::remove_pointer_t<decltype(number)>>(*c); });
}

}  // extern "C"
