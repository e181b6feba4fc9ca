// A tile of keys and values: where its tokens lie, what a thread has at hand for it, and what is fetched meanwhile. See
// cpu_attention.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "queries.h"
#include "states.h"
#include "tiles.h"
#include "vectors.h"

namespace {

struct alignas(64) Line {
    float numbers[16];
};
struct Scratch {
    std::vector<Line> lines;
    float* of(int64_t numbers) {
        if (int64_t(lines.size()) * 16 < numbers) lines.resize((numbers + 15) / 16);
        return lines.data()->numbers;
    }
};

// Tokens that are read soon. They are fetched from memory meanwhile, some lines at a time, in the order in which they lie.
template <class T>
struct Ahead {
    static constexpr int LINE_BYTES = 64;
    const T* const* tokens;
    int from, end;    // of the tokens
    int line, lines;  // of one of them

    // Lines to fetch at each of so many times.
    int at_each(int times) const { return ((end - from) * lines - line + times - 1) / times; }
    void fetch(int count) {
        for (; count > 0 && from < end; count--) {
            prefetch_far(reinterpret_cast<const char*>(tokens[from]) + line * LINE_BYTES);
            if (++line == lines) line = 0, from++;
        }
    }
};

template <class T>
struct Room {  // of one thread
    Scratch query, columns, keys, values, scores, done, segment;
    const T *tokens[KEYS], *next_tokens[KEYS];
    Span next_seen;    // of the latter
    int next_lines;    // of each of them
    const Item* next;  // what this thread is likely to do next, or null
    Tiles tiles;
};

template <class T>
struct Tile {
    const Attention& a;
    const Shape& shape;
    const uint32_t *query, *keys;  // [rows][words], [words][KEYS]
    const T* const* values;        // of each key
    int64_t value_offset;
    float* scores;                 // [rows][KEYS]
    State state;
    const Item& item;
    int start;  // position of its first key
};

// Where the tokens [from, to) lie; the first of the tile is at `start`.
template <class T>
void locate(const Attention& a, const Item& item, int start, int from, int to, const T** tokens) {
    const T* pages = static_cast<const T*>(a.pages) + item.kv_head * a.page_head_stride;
    const int32_t* table = a.block_table + int64_t(item.row) * a.table_width;
    int block = from / a.block_tokens, offset = from - block * a.block_tokens;
    for (int position = from; position < to; block++, offset = 0) {
        const T* token = pages + table[block] * a.page_stride + offset * a.page_token_stride;
        for (; offset < a.block_tokens && position < to; offset++, position++, token += a.page_token_stride)
            tokens[position - start] = token;
    }
}

// In place of tokens that are not seen another one is read, which then has no weight.
template <class T>
void fill_up(const T** tokens, int from, int to) {
    std::fill(tokens, tokens + from, tokens[from]);
    std::fill(tokens + to, tokens + KEYS, tokens[from]);
}

// Finds the tokens that are to be fetched from memory in advance: of the tile at `start`, or of the first one of the next item.
template <class T>
void look_ahead(const Attention& a, const Item& item, int start, Room<T>& room) {
    const bool is_here = start < item.end;
    if (!is_here && !room.next) return;
    const Item& owner = is_here ? item : *room.next;
    const int from = is_here ? start : owner.begin, first = from / KEYS * KEYS, to = std::min(first + KEYS, owner.end);
    locate(a, owner, first, from, to, room.next_tokens);
    room.next_seen = {from - first, to - first};
    const int64_t numbers = (owner.kv_heads - 1) * a.page_head_stride + std::max<int64_t>(a.key_dim, a.value_offset + a.value_dim);
    room.next_lines = int((numbers * sizeof(T) + Ahead<T>::LINE_BYTES - 1) / Ahead<T>::LINE_BYTES);
}

// While one of several heads is computed, its share of them is fetched.
template <class T>
Ahead<T> share_of(const Room<T>& room, int head, int heads) {
    const auto [from, end] = room.next_seen;
    return {room.next_tokens, from + (end - from) * head / heads, from + (end - from) * (head + 1) / heads, 0, room.next_lines};
}

}  // namespace
