// A tile of keys in matrix units, where the processor has them: both products are theirs. See cpu_attention.cpp.

#pragma once

#include "in_vectors.h"

#if HAS_TILES

#include <algorithm>
#include <cstring>

namespace {

constexpr int PAIRS = KEYS / 2;
static_assert(KEYS == COLUMNS && WIDTH == TILE, "a tile of keys is a panel");

// Values of the keys [from, to) as panels of 64 numbers: a word has a number of two keys. The even numbers of each 32 come
// first, as in all sums. CHECKS: returns whether all are finite. fetch: called for each pair
template <class T, bool CHECKS, class Function>
bool pair_values(const Attention& a, const Shape& shape, int from, int to, Room<T>& room, Function fetch) {
    float* panels = room.values.of(int64_t(PAIRS) * shape.width);
    const Words exponents = all_words(0x7F807F80u);
    constexpr __mmask32 UPPER = 0xAAAAAAAAu;
    __mmask32 endless = 0;
    for (int t = 0; t < KEYS; t += 2) {
        fetch();
        for (int d = 0; d < shape.width; d += 2 * WIDTH) {
            const auto numbers_of = [&](int key) {
                const bool is_there = from <= key && key < to && d < a.value_dim;
                return is_there ? load_words(room.tokens[key] + a.value_offset + d, a.value_dim - d) : Words{};
            };
            const Words first = numbers_of(t), second = numbers_of(t + 1);
            if (CHECKS)
                endless |= _mm512_cmpeq_epi16_mask(first & exponents, exponents) |
                           _mm512_cmpeq_epi16_mask(second & exponents, exponents);
            float* panel = panels + (int64_t(d / COLUMNS) * PAIRS + t / 2) * COLUMNS + d % COLUMNS;
            const Words even = _mm512_mask_blend_epi16(UPPER, first, _mm512_slli_epi32(second, 16));
            const Words odd = _mm512_mask_blend_epi16(UPPER, _mm512_srli_epi32(first, 16), second);
            store_lanes(as_lanes(even), panel);
            store_lanes(as_lanes(odd), panel + WIDTH);
        }
    }
    return !endless;
}

// Rows [begin, end) meet the gathered keys, where their scores are not known yet, and values, at most `Tiles::MOST_ROWS` at
// once. seen(m): what a row sees; fetch: called now and then
template <class T, class Seen, class Function>
void rows_in_tiles(const Tile<T>& tile, int begin, int end, Room<T>& room, Seen seen, Function fetch) {
    const Shape& shape = tile.shape;
    const float* values = room.values.of(0);
    const int blocks = (end - begin + Tiles::MOST_ROWS - 1) / Tiles::MOST_ROWS;
    alignas(64) bfloat16 weights[Tiles::MOST_ROWS * KEYS];
    alignas(64) float shrink[Tiles::MOST_ROWS + WIDTH];
    for (int b = 0; b < blocks; b++) {
        const int from = begin + (end - begin) * b / blocks, to = begin + (end - begin) * (b + 1) / blocks;
        const TileRows query{tile.query + int64_t(from) * shape.words, shape.words * 4, to - from};
        float* to_scores = tile.scores + int64_t(from) * KEYS;
        if (tile.keys) room.tiles.multiply(query, tile.keys, shape.words, {}, true, to_scores, KEYS, fetch);
        // Neighbours that see the same keys are weighed together.
        for (int m = from, next; m < to; m = next) {
            const Span keys = seen(m);
            for (next = m + 1; next < std::min(to, m + ROWS) && seen(next) == keys;) next++;
            with_constant(next - m, [&](auto count) {
                constexpr int R = std::min<int>(count, ROWS);
                if (tile.a.slopes) add_slopes<T, R>(tile, m);
                float *scores = tile.scores + int64_t(m) * KEYS, *total = tile.state.total + m * WIDTH;
                if (keys == Span{0, KEYS})
                    weigh<R, true>(tile.a, scores, 0, KEYS, total, tile.state.top + m, shrink + m - from);
                else
                    weigh<R, false>(tile.a, scores, keys.begin, keys.end, total, tile.state.top + m, shrink + m - from);
            });
        }
        float* sums = tile.state.sums + int64_t(from) * shape.width;
        for (int m = 0; m < to - from; m++) {
            for (int t = 0; t < KEYS; t += 2 * WIDTH) {
                const float* scores = tile.scores + int64_t(from + m) * KEYS + t;
                const __m512bh both = _mm512_cvtne2ps_pbh(load_lanes(scores + WIDTH), load_lanes(scores));
                std::memcpy(static_cast<void*>(weights + m * KEYS + t), &both, sizeof both);
            }
            if (shrink[m] == 1.0f) continue;
            for (int d = 0; d < shape.width; d += WIDTH)
                store_lanes(load_lanes(sums + m * shape.width + d) * all_lanes(shrink[m]), sums + m * shape.width + d);
        }
        const TileRows rows{weights, KEYS * int64_t(sizeof(bfloat16)), to - from};
        for (int d = 0; d < shape.width; d += COLUMNS)
            room.tiles.multiply(rows, reinterpret_cast<const uint32_t*>(values) + int64_t(d) * PAIRS, PAIRS, {}, false,
                                sums + d, shape.width, fetch);
    }
}

// Whether an item's keys are read where they lie, sixteen tokens as a tile: those of a single query.
inline bool reads_tiles_of_keys(const Attention& a, const Shape& shape, const Item& item) {
    const bool lie_in_tiles = a.block_tokens % TILE == 0 && a.key_dim == PER_WORD<bfloat16> * shape.words;
    return shape.is_in_tiles && item.count == 1 && shape.group <= TILE && lie_in_tiles;
}

// Scores of a single query's few rows, of keys where they lie. A tile's keys that are not seen have scores that are not read.
// head: which of the item's; fetch: called for each tile
template <class T, class Function>
void scores_where_keys_lie(const Tile<T>& tile, int head, int from, int to, Room<T>& room, Function fetch) {
    const int rows = tile.shape.group, begin = from / TILE * TILE;
    const void* first[KEYS / TILE];
    for (int t = begin; t < to; t += TILE) {
        const int known = std::max(t, from);
        first[(t - begin) / TILE] = room.tokens[known] - (known - t) * tile.a.page_token_stride;
    }
    const uint32_t* columns = reinterpret_cast<const uint32_t*>(room.columns.of(0)) + head * tile.shape.words * TILE;
    alignas(64) float by_key[KEYS * TILE];
    room.tiles.meet_columns(first, (to - begin + TILE - 1) / TILE, tile.a.page_token_stride * sizeof(T), columns, rows,
                            tile.shape.words, by_key, fetch);
    const Words places = (Words)(LANE_NUMBERS * TILE);
    for (int r = 0; r < rows; r++)
        for (int t = begin; t < to; t += WIDTH)
            store_lanes(_mm512_i32gather_ps(places, by_key + (t - begin) * TILE + r, 4), tile.scores + r * KEYS + t);
}

// The tile that begins at `start`, of whose keys [from, to) are seen. head: which of the item's, which are computed in turn
template <class T>
void in_matrix_units(const Attention& a, const Shape& shape, const Item& item, int head, int start, int from, int to,
                     Ahead<T> ahead, Room<T>& room, State state) {
    const int rows = item.count * shape.group;
    const bool is_direct = reads_tiles_of_keys(a, shape, item);
    // What comes next is fetched all the while, so that memory is never idle.
    const int64_t tiles_of_keys = is_direct ? KEYS / TILE * (shape.words / TILE) : 0;
    const int64_t tiles_of_values = Tiles::fetches(rows, PAIRS, COLUMNS) * (shape.width / COLUMNS);
    const auto fetch = [&ahead, lines = ahead.at_each(PAIRS + tiles_of_keys + tiles_of_values)] { ahead.fetch(lines); };
    if (!is_direct) gather_keys(a, shape, from, to, room);
    const Tile<T> tile{a, shape, reinterpret_cast<const uint32_t*>(room.query.of(0)) + int64_t(head) * rows * shape.words,
                       is_direct ? nullptr : reinterpret_cast<const uint32_t*>(room.keys.of(0)), room.tokens, 0,
                       room.scores.of(int64_t(rows) * KEYS), state, item, start};
    if (is_direct) scores_where_keys_lie(tile, head, from, to, room, fetch);
    // A single query sees all of these, so that what is no number is one in its sums.
    const bool is_finite = item.count == 1 ? pair_values<T, false>(a, shape, from, to, room, fetch)
                                           : pair_values<T, true>(a, shape, from, to, room, fetch);
    const auto seen_by = [&](int m) { return a.is_causal ? seen_of_tile(a, item, m / shape.group, start) : Span{from, to}; };
    const Span some = a.is_causal ? queries_that_see(a, item, start, start + KEYS - 1) : Span{0, item.count};
    if (is_finite) return rows_in_tiles(tile, some.begin * shape.group, some.end * shape.group, room, seen_by, fetch);
    // What is no number would be one in no sum, even where it weighs zero: each query has the values that it sees.
    for (int m = some.begin * shape.group; m < some.end * shape.group; m += shape.group) {
        const Span seen = seen_by(m);
        pair_values<T, false>(a, shape, seen.begin, seen.end, room, fetch);
        rows_in_tiles(tile, m, m + shape.group, room, seen_by, fetch);
    }
}

}  // namespace

#endif
