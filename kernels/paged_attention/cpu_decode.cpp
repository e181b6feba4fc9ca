// Paged attention of single queries, and writing new tokens to their pages, on a CPU. Plain C ABI; see cpu.py.
//
// One piece of work is a row (one query of every head) and a run of its tokens; pieces of a long row are merged at the
// end, so that few long rows keep all threads busy. Within a piece, per kv head:
//
//     tile of 64 tokens      scores [query heads of the kv head][tokens]   = q . k       16 tokens at a time
//     softmax as it goes     new maximum, rescale what is summed, weights  = exp(score - maximum)
//     sum of values          [query heads][numbers of a value]             += weight * v  4 x 64 numbers in registers
//
// A token outside [first, end) is never read: its bytes may be NaN.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "numbers.h"

extern "C" {

struct Attention {
    const void* query;          // [T, H, Dk], its last axis dense
    const void* pages;          // [pages, tokens, K, content], its last axis dense
    void* out;                  // [T, H, Dv], dense
    const float* sinks;         // [H] or null
    const int32_t* block_table;  // [rows, table_width]
    const int64_t* token_of;    // [rows]: which packed token is the row's query
    const int32_t* piece_row;   // [pieces]
    const int32_t* piece_first;  // [pieces]: first token of the sequence that it reads
    const int32_t* piece_end;   // [pieces]
    const int32_t* row_pieces;  // [rows + 1]: where the pieces of each row begin
    float* partial;             // [pieces, H, Dv + 2], if any row has several pieces
    int64_t query_token_stride, query_head_stride;            // all strides in elements
    int64_t page_stride, page_token_stride, page_head_stride;
    int64_t value_offset;       // from a key to its value
    int32_t rows, pieces, heads, kv_heads, key_dim, value_dim, block_tokens, table_width;
    float scale, softcap;       // softcap 0: none
    int32_t kind;  // of numbers: 0 float32, 1 bfloat16, 2 float16
};

struct Write {
    const void *key, *value;   // [T, K, Dk] and [T, K, Dv], last axes dense
    void* pages;
    const int64_t *page, *offset;  // [T]
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t page_stride, page_token_stride, page_head_stride;
    int32_t tokens, kv_heads, key_bytes, value_bytes, itemsize;
};

}  // extern "C"

namespace {

constexpr int TILE = 64, WIDE = 4;

// The sums of 16 vectors, as one: neighbouring halves are added, then quarters, until a lane is left of each.
template <int W, size_t... I>
inline Vec fold(Vec p, Vec q, std::index_sequence<I...>) {
    typedef int32_t Places __attribute__((vector_size(4 * LANES)));
    constexpr Places low = {(int32_t(I) / (2 * W) * 2 * W + int32_t(I) % W + (int32_t(I) / W % 2) * LANES)...};
    constexpr Places high = {(int32_t(I) / (2 * W) * 2 * W + int32_t(I) % W + W + (int32_t(I) / W % 2) * LANES)...};
    return __builtin_shuffle(p, q, low) + __builtin_shuffle(p, q, high);
}
inline Vec sums(Vec* v) {
    constexpr auto lanes = std::make_index_sequence<LANES>();
    for (int i = 0; i < 8; i++) v[i] = fold<8>(v[i], v[i + 8], lanes);
    for (int i = 0; i < 4; i++) v[i] = fold<4>(v[i], v[i + 4], lanes);
    for (int i = 0; i < 2; i++) v[i] = fold<2>(v[i], v[i + 2], lanes);
    return fold<1>(v[0], v[1], lanes);
}

// scores[0 .. 16) = q . keys[0 .. 16)
template <class T>
inline void dot(const float* q, const T* const* keys, int dim, float* scores) {
    Vec acc[LANES] = {};
    int d = 0;
    for (; d + LANES <= dim; d += LANES) {
        const Vec query = load(q + d);
        for (int n = 0; n < LANES; n++) acc[n] += query * load(keys[n] + d);
    }
    Vec total = sums(acc);
    if (d < dim)
        for (int n = 0; n < LANES; n++)
            for (int e = d; e < dim; e++) total[n] += q[e] * to_float(keys[n][e]);
    store(total, scores);
}

// acc[g][0 .. 16 * B) += sum over t of weights[g][t] * values[t]
template <int G, int B, class T>
inline void weigh(const float* weights, const T* const* values, int64_t shift, int count, float* acc, int dim) {
    Vec total[G][B];
    for (int g = 0; g < G; g++)
        for (int b = 0; b < B; b++) total[g][b] = load(acc + g * dim + b * LANES);
    for (int t = 0; t < count; t++) {
        const T* value = values[t] + shift;
        Vec v[B];
        for (int b = 0; b < B; b++) v[b] = load(value + b * LANES);
        for (int g = 0; g < G; g++)
            for (int b = 0; b < B; b++) total[g][b] += weights[g * TILE + t] * v[b];
    }
    for (int g = 0; g < G; g++)
        for (int b = 0; b < B; b++) std::memcpy(acc + g * dim + b * LANES, &total[g][b], sizeof(Vec));
}

// One piece, one kv head, `G` of its query heads. Leaves sums [G][Dv], sums of weights and maxima.
template <int G, class T>
void piece(const Attention& a, int row, int first, int end, int kv_head, const float* q, float* acc, float* total,
           float* top) {
    const T* pages = static_cast<const T*>(a.pages) + kv_head * a.page_head_stride;
    const int32_t* table = a.block_table + int64_t(row) * a.table_width;
    const T* tokens[TILE];
    alignas(64) float scores[G * TILE];
    std::fill(acc, acc + G * a.value_dim, 0.0f);
    for (int g = 0; g < G; g++) total[g] = 0.0f, top[g] = -3e38f;
    for (int start = first; start < end; start += TILE) {
        int count = std::min(TILE, end - start);
        for (int t = 0; t < count; t++) {
            int position = start + t, block = position / a.block_tokens;
            tokens[t] = pages + int64_t(table[block]) * a.page_stride +
                        (position - block * a.block_tokens) * a.page_token_stride;
        }
        for (int t = count; t % LANES; t++) tokens[t] = tokens[0];  // whose scores are not read
        for (int t = 0; t < count; t += LANES)
            for (int g = 0; g < G; g++) dot(q + g * a.key_dim, tokens + t, a.key_dim, scores + g * TILE + t);
        for (int g = 0; g < G; g++) {
            float* s = scores + g * TILE;
            if (a.softcap > 0)
                for (int i = 0; i < count; i++) s[i] = a.softcap * std::tanh(s[i] / a.softcap);
            float highest = top[g];
            for (int i = 0; i < count; i++) highest = std::max(highest, s[i]);
            float shrink = std::exp(top[g] - highest), added = 0;
            for (int i = 0; i < count; i++) s[i] = std::exp(s[i] - highest);
            for (int i = 0; i < count; i++) added += s[i];
            if (shrink != 1.0f)
                for (int d = 0; d < a.value_dim; d++) acc[g * a.value_dim + d] *= shrink;
            total[g] = total[g] * shrink + added;
            top[g] = highest;
        }
        int d = 0;
        for (; d + WIDE * LANES <= a.value_dim; d += WIDE * LANES)
            weigh<G, WIDE>(scores, tokens, a.value_offset + d, count, acc + d, a.value_dim);
        for (; d + LANES <= a.value_dim; d += LANES)
            weigh<G, 1>(scores, tokens, a.value_offset + d, count, acc + d, a.value_dim);
        for (; d < a.value_dim; d++)
            for (int g = 0; g < G; g++)
                for (int i = 0; i < count; i++)
                    acc[g * a.value_dim + d] += scores[g * TILE + i] * to_float(tokens[i][a.value_offset + d]);
    }
}

template <class T>
void finish(const Attention& a, int row, int head, const float* acc, float total, float top) {
    float weight = total > 0 ? 1.0f / total : 0.0f;
    if (a.sinks) {  // one logit more, without a value
        const float highest = std::max(top, a.sinks[head]), shrink = std::exp(top - highest);
        weight = shrink / (total * shrink + std::exp(a.sinks[head] - highest));
    }
    T* out = static_cast<T*>(a.out) + (a.token_of[row] * a.heads + head) * a.value_dim;
    for (int d = 0; d < a.value_dim; d++) from_float(acc[d] * weight, out + d);
}

template <class T>
void attend(const Attention& a) {
    const int group = a.heads / a.kv_heads, record = a.value_dim + 2;
#pragma omp parallel
    {
        std::vector<float> query(WIDE * a.key_dim), acc(WIDE * a.value_dim);
#pragma omp for schedule(dynamic)
        for (int work = 0; work < a.pieces * a.kv_heads; work++) {
            const int p = work / a.kv_heads, kv_head = work % a.kv_heads, row = a.piece_row[p];
            const bool is_whole = a.row_pieces[row + 1] - a.row_pieces[row] == 1;
            for (int g = 0; g < group; g += WIDE) {
                const int some = std::min(WIDE, group - g), head = kv_head * group + g;
                for (int h = 0; h < some; h++) {
                    const T* q = static_cast<const T*>(a.query) + a.token_of[row] * a.query_token_stride +
                                 (head + h) * a.query_head_stride;
                    for (int d = 0; d < a.key_dim; d++) query[h * a.key_dim + d] = to_float(q[d]) * a.scale;
                }
                float total[WIDE], top[WIDE];
                const int first = a.piece_first[p], end = a.piece_end[p];
                switch (some) {
                    case 1: piece<1, T>(a, row, first, end, kv_head, query.data(), acc.data(), total, top); break;
                    case 2: piece<2, T>(a, row, first, end, kv_head, query.data(), acc.data(), total, top); break;
                    case 3: piece<3, T>(a, row, first, end, kv_head, query.data(), acc.data(), total, top); break;
                    default: piece<4, T>(a, row, first, end, kv_head, query.data(), acc.data(), total, top);
                }
                for (int h = 0; h < some; h++) {
                    const float* sums = acc.data() + h * a.value_dim;
                    if (is_whole) {
                        finish<T>(a, row, head + h, sums, total[h], top[h]);
                    } else {
                        float* kept = a.partial + (int64_t(p) * a.heads + head + h) * record;
                        std::copy(sums, sums + a.value_dim, kept);
                        kept[a.value_dim] = total[h], kept[a.value_dim + 1] = top[h];
                    }
                }
            }
        }
#pragma omp for schedule(static)
        for (int row = 0; row < a.rows; row++) {
            const int from = a.row_pieces[row], to = a.row_pieces[row + 1];
            if (to - from < 2) continue;
            std::vector<float> merged(a.value_dim);
            for (int head = 0; head < a.heads; head++) {
                float top = -3e38f, total = 0;
                std::fill(merged.begin(), merged.end(), 0.0f);
                for (int p = from; p < to; p++)
                    top = std::max(top, a.partial[(int64_t(p) * a.heads + head) * record + a.value_dim + 1]);
                for (int p = from; p < to; p++) {
                    const float* kept = a.partial + (int64_t(p) * a.heads + head) * record;
                    const float weight = std::exp(kept[a.value_dim + 1] - top);
                    for (int d = 0; d < a.value_dim; d++) merged[d] += weight * kept[d];
                    total += weight * kept[a.value_dim];
                }
                finish<T>(a, row, head, merged.data(), total, top);
            }
        }
    }
}

}  // namespace

extern "C" {

void intarsia_attend(const Attention* a) {
    with_kind(a->kind, [&](auto* number) { attend<std::remove_pointer_t<decltype(number)>>(*a); });
}

void intarsia_write(const Write* w) {
    const auto* keys = static_cast<const char*>(w->key);
    const auto* values = static_cast<const char*>(w->value);
    auto* pages = static_cast<char*>(w->pages);
    const int64_t size = w->itemsize;
#pragma omp parallel for schedule(static) if (w->tokens > 256)
    for (int t = 0; t < w->tokens; t++)
        for (int h = 0; h < w->kv_heads; h++) {
            char* to = pages + size * (w->page[t] * w->page_stride + w->offset[t] * w->page_token_stride +
                                       h * w->page_head_stride);
            std::memcpy(to, keys + size * (t * w->key_token_stride + h * w->key_head_stride), w->key_bytes);
            std::memcpy(to + w->key_bytes,
                        values + size * (t * w->value_token_stride + h * w->value_head_stride), w->value_bytes);
        }
}

}  // extern "C"
