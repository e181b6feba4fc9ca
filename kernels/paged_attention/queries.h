// What a step of attention is given, how it is cut into items, and which keys a query sees. See cpu_attention.cpp.

#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

extern "C" {

struct Step {  // what all layers of one mask have in common
    const int64_t *page, *offset;  // [T]: where new tokens go
    const int32_t* block_table;    // [rows, table_width]
    const int32_t *queries, *kv_len;  // [rows]
    int32_t tokens, rows, table_width, block_tokens;
    int32_t window, chunk, is_causal;  // tokens, 0: none
};

struct Layer {
    const void* query;           // [T, H, Dk], its last axis dense
    const void* pages;           // [pages, tokens, K, content], its last axis dense
    void* out;                   // [T, H, Dv], dense
    const float* sinks;          // [H] or null
    const float* slopes;         // [H] or null: by which scores fall with each token of distance
    int64_t query_token_stride, query_head_stride;  // all strides in numbers
    int64_t page_stride, page_token_stride, page_head_stride;
    int64_t value_offset;        // from a key to its value
    int32_t heads, kv_heads, key_dim, value_dim;
    float scale, softcap;        // scale is positive; softcap 0: none
    int32_t kind;                // of numbers: 0 float32, 1 bfloat16, 2 float16
};

}  // extern "C"

namespace {

struct Attention : Step, Layer {};

constexpr int KEYS = 64, SEGMENT = 512;  // these two are part of the order

// First position that the query at `position` sees, as GroupBatch.oldest_visible has it.
inline int oldest(const Attention& a, int position) {
    if (a.chunk) return position - position % a.chunk;
    return a.window ? std::max(0, position - a.window + 1) : 0;
}
// The last query that sees the key at `position`.
inline int last_to_see(const Attention& a, int position) {
    if (a.chunk) return position - position % a.chunk + a.chunk - 1;
    return a.window ? position + a.window - 1 : INT_MAX / 2;
}

struct Item {  // queries [first, first + count) of a row, and the query heads of some kv heads: of one if there are more queries
    int row, first, count, kv_head, kv_heads;
    int position;    // of the first one
    int begin, end;  // positions that they see
    int64_t token;   // the first one, among those of all rows
};

struct Span {
    int begin, end;
    bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
};

// Of an item's queries those that see any key of positions [first, last].
inline Span queries_that_see(const Attention& a, const Item& item, int first, int last) {
    const int begin = std::clamp(first - item.position, 0, item.count);
    return {begin, std::clamp(last_to_see(a, last) + 1 - item.position, begin, item.count)};
}

// The keys of the tile at `start` that the query q of an item sees.
inline Span seen_of_tile(const Attention& a, const Item& item, int q, int start) {
    const int position = item.position + q;
    return {std::max(0, oldest(a, position) - start), std::min(KEYS, position + 1 - start)};
}

}  // namespace
