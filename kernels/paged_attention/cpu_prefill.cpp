// Paged attention of rows with several queries, on a CPU. Plain C ABI; see paged_attention/native.py.
//
// A tile is some queries of a row times the query heads that share a kv head, as rows of matrix products. Keys come 64 at
// a time, gathered from their pages and widened to float32 once per tile: keys as columns, values as rows, so that both
// products are the same one, with its sums in registers.
//
//     scores [rows][64]   = q [rows][Dk] . keys [Dk][64]
//     softmax as it goes    new maximum, rescale what is summed, weights = exp(score - maximum)
//     sums [rows][Dv]    += weights [rows][64] . values [64][Dv]
//
// A token that no query of the tile sees is never read: its bytes may be NaN.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers.h"

extern "C" {

struct Prefill {
    const void* query;           // [T, H, Dk], its last axis dense
    const void* pages;           // [pages, tokens, K, content], its last axis dense
    void* out;                   // [T, H, Dv], dense
    const float* sinks;          // [H] or null
    const int32_t* block_table;  // [rows, table_width]
    const int64_t* first_token;  // [rows]: its first packed token
    const int32_t *queries, *kv_len;       // [rows]
    const int32_t *tile_row, *tile_first;  // [tiles]: row, and first of its queries
    int64_t query_token_stride, query_head_stride;  // all strides in elements
    int64_t page_stride, page_token_stride, page_head_stride;
    int64_t value_offset;        // from a key to its value
    int32_t tiles, tile_queries, heads, kv_heads, key_dim, value_dim, block_tokens, table_width;
    int32_t window, chunk, is_causal;  // tokens, 0: none
    float scale, softcap;        // softcap 0: none
    int32_t kind;                // of numbers: 0 float32, 1 bfloat16, 2 float16
};

}  // extern "C"

namespace {

constexpr int KEYS = 64;  // at a time
constexpr float LOG2_E = 1.44269504f, NOWHERE = -3e38f;
#if defined(__AVX512F__)
constexpr int ROWS = 6;  // of a product whose sums stay in registers: 6 x 4 vectors of 16
#else
constexpr int ROWS = 2;
#endif

// c[R][16 * B] = a[R][depth] . b[depth][16 * B], added to what is there if `ADD`
template <int R, int B, bool ADD>
inline void product(const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride, int depth) {
    Vec total[R][B];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < B; v++) total[r][v] = ADD ? load(c + r * c_stride + v * LANES) : Vec{};
    for (int d = 0; d < depth; d++) {
        Vec row[B];
        for (int v = 0; v < B; v++) row[v] = load(b + d * b_stride + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < B; v++) total[r][v] += a[r * a_stride + d] * row[v];
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < B; v++) store(total[r][v], c + r * c_stride + v * LANES);
}

template <int B, bool ADD>
void all_rows(int rows, const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride, int depth) {
    int r = 0;
    for (; r + ROWS <= rows; r += ROWS)
        product<ROWS, B, ADD>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, depth);
    for (; r < rows; r++) product<1, B, ADD>(a + r * a_stride, a_stride, b, b_stride, c + r * c_stride, c_stride, depth);
}

template <bool ADD>
void multiply(int rows, const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride, int depth,
              int width) {
    int w = 0;
    for (; w + 4 * LANES <= width; w += 4 * LANES)
        all_rows<4, ADD>(rows, a, a_stride, b + w, b_stride, c + w, c_stride, depth);
    if (w + 2 * LANES <= width) {
        all_rows<2, ADD>(rows, a, a_stride, b + w, b_stride, c + w, c_stride, depth);
        w += 2 * LANES;
    }
    if (w < width) all_rows<1, ADD>(rows, a, a_stride, b + w, b_stride, c + w, c_stride, depth);
}

// First position that the query at `position` sees, as GroupBatch.oldest_visible has it.
inline int oldest(const Prefill& a, int position) {
    if (a.chunk) return position - position % a.chunk;
    return a.window ? std::max(0, position - a.window + 1) : 0;
}

struct Room {  // of one thread
    std::vector<float> q, scores, sums, keys, values, total, top;
};

// Rows become columns: blocks off the diagonal change places, halves first, then quarters, until single lanes.
template <int W, size_t... I>
inline void exchange(Vec& p, Vec& q, std::index_sequence<I...>) {
    typedef int32_t Places __attribute__((vector_size(4 * LANES)));
    constexpr Places low = {(int32_t(I) & W ? int32_t(I) - W + LANES : int32_t(I))...};
    constexpr Places high = {(int32_t(I) & W ? int32_t(I) + LANES : int32_t(I) + W)...};
    const Vec lower = __builtin_shuffle(p, q, low), higher = __builtin_shuffle(p, q, high);
    p = lower, q = higher;
}
template <int W>
inline void exchange_all(Vec* v) {
    for (int i = 0; i < LANES; i++)
        if (!(i & W)) exchange<W>(v[i], v[i + W], std::make_index_sequence<LANES>());
}
inline void transpose(Vec* v) { exchange_all<8>(v), exchange_all<4>(v), exchange_all<2>(v), exchange_all<1>(v); }

// Tokens [start, start + count) of a row: keys as columns, values as rows, both widened; what is beyond is zero.
template <class T>
void gather(const Prefill& a, const T* pages, const int32_t* table, int start, int count, int width, Room& room) {
    const T* tokens[KEYS];
    for (int t = 0; t < count; t++) {
        const int position = start + t, block = position / a.block_tokens;
        tokens[t] = pages + int64_t(table[block]) * a.page_stride +
                    (position - block * a.block_tokens) * a.page_token_stride;
    }
    for (int t = 0; t < KEYS; t += LANES) {
        int d = 0;
        for (; d + LANES <= a.key_dim; d += LANES) {
            Vec rows[LANES];
            for (int i = 0; i < LANES; i++) rows[i] = t + i < count ? load(tokens[t + i] + d) : Vec{};
            transpose(rows);
            for (int i = 0; i < LANES; i++) store(rows[i], room.keys.data() + (d + i) * KEYS + t);
        }
        for (; d < a.key_dim; d++)
            for (int i = t; i < t + LANES; i++) room.keys[d * KEYS + i] = i < count ? to_float(tokens[i][d]) : 0.0f;
    }
    for (int t = 0; t < KEYS; t++) {
        float* value = room.values.data() + t * width;
        int d = 0;
        if (t < count) {
            const T* from = tokens[t] + a.value_offset;
            for (; d + LANES <= a.value_dim; d += LANES) store(load(from + d), value + d);
            for (; d < a.value_dim; d++) value[d] = to_float(from[d]);
        }
        std::fill(value + d, value + width, 0.0f);
    }
}

// One row's scores, of base 2, become weights; what it has summed is rescaled when its maximum grows. [first, last) is
// what it sees.
inline void weigh(const Prefill& a, float* s, int first, int last, float* sums, int width, float& total, float& top) {
    if (first == last) return std::fill(s, s + KEYS, 0.0f);
    if (a.softcap > 0)
        for (int i = first; i < last; i++) s[i] = LOG2_E * a.softcap * std::tanh(s[i] / a.softcap);
    std::fill(s, s + first, NOWHERE);
    std::fill(s + last, s + KEYS, NOWHERE);
    Vec v[KEYS / LANES], most = load(s);
    for (int i = 0; i < KEYS / LANES; i++) {
        v[i] = load(s + i * LANES);
        most = most < v[i] ? v[i] : most;
    }
    float highest = top;
    for (int i = 0; i < LANES; i++) highest = std::max(highest, most[i]);
    Vec added = {};
    for (int i = 0; i < KEYS / LANES; i++) {
        v[i] = two_to(v[i] - highest);
        added += v[i];
        store(v[i], s + i * LANES);
    }
    if (highest > top) {
        const float shrink = std::exp2(top - highest);
        for (int d = 0; d < width; d += LANES) store(load(sums + d) * shrink, sums + d);
        total *= shrink;
        top = highest;
    }
    total += sum(added);
}

template <class T>
void tile(const Prefill& a, int number, int kv_head, Room& room) {
    const int group = a.heads / a.kv_heads, row = a.tile_row[number], first = a.tile_first[number];
    const int count = std::min(a.tile_queries, a.queries[row] - first), rows = count * group;
    const int width = (a.value_dim + LANES - 1) / LANES * LANES;
    const int64_t token = a.first_token[row] + first;
    const int context = a.kv_len[row] - a.queries[row];
    const T* pages = static_cast<const T*>(a.pages) + kv_head * a.page_head_stride;
    const int32_t* table = a.block_table + int64_t(row) * a.table_width;
    room.q.resize(rows * a.key_dim), room.scores.resize(rows * KEYS), room.keys.resize(a.key_dim * KEYS);
    room.values.resize(KEYS * width), room.sums.assign(rows * width, 0.0f);
    room.total.assign(rows, 0.0f), room.top.assign(rows, NOWHERE);
    const float scale = a.softcap > 0 ? a.scale : a.scale * LOG2_E;
    for (int m = 0; m < rows; m++) {
        const T* q = static_cast<const T*>(a.query) + (token + m / group) * a.query_token_stride +
                     (kv_head * group + m % group) * a.query_head_stride;
        for (int d = 0; d < a.key_dim; d++) room.q[m * a.key_dim + d] = to_float(q[d]) * scale;
    }
    const int begin = a.is_causal ? oldest(a, context + first) : 0;
    const int end = a.is_causal ? context + first + count : a.kv_len[row];
    for (int start = begin; start < end; start += KEYS) {
        const int here = std::min(KEYS, end - start);
        gather(a, pages, table, start, here, width, room);
        multiply<false>(rows, room.q.data(), a.key_dim, room.keys.data(), KEYS, room.scores.data(), KEYS, a.key_dim, KEYS);
        for (int m = 0; m < rows; m++) {
            int low = 0, high = here;
            if (a.is_causal) {
                const int position = context + first + m / group;
                low = std::clamp(oldest(a, position) - start, 0, here);
                high = std::clamp(position + 1 - start, low, here);
            }
            weigh(a, room.scores.data() + m * KEYS, low, high, room.sums.data() + m * width, width, room.total[m],
                  room.top[m]);
        }
        multiply<true>(rows, room.scores.data(), KEYS, room.values.data(), width, room.sums.data(), width, here, width);
    }
    for (int m = 0; m < rows; m++) {
        const int head = kv_head * group + m % group;
        float weight = room.total[m] > 0 ? 1.0f / room.total[m] : 0.0f;
        if (a.sinks) {  // one logit more, without a value
            const float sink = a.sinks[head] * LOG2_E, highest = std::max(room.top[m], sink);
            const float shrink = std::exp2(room.top[m] - highest);
            weight = shrink / (room.total[m] * shrink + std::exp2(sink - highest));
        }
        T* out = static_cast<T*>(a.out) + ((token + m / group) * a.heads + head) * a.value_dim;
        for (int d = 0; d < a.value_dim; d++) from_float(room.sums[m * width + d] * weight, out + d);
    }
}

template <class T>
void prefill(const Prefill& a) {
#pragma omp parallel
    {
        Room room;
#pragma omp for schedule(dynamic)
        for (int work = 0; work < a.tiles * a.kv_heads; work++) tile<T>(a, work / a.kv_heads, work % a.kv_heads, room);
    }
}

}  // namespace

extern "C" {

void intarsia_prefill(const Prefill* a) {
    with_kind(a->kind, [&](auto* number) { prefill<std::remove_pointer_t<decltype(number)>>(*a); });
}

}  // extern "C"
