// A tile of keys in vectors: some rows of queries meet its keys, scores become weights, and values are added. See
// cpu_attention.cpp.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "functions.h"
#include "tile.h"

namespace {

constexpr int VECTORS = KEYS / WIDTH;
constexpr int ROWS = 6;  // of a product whose sums stay in registers
constexpr int DIRECT_ROWS = REGISTERS / 4;  // beside a square of keys that is turned around

template <class T>
using Factor = std::conditional_t<PER_WORD<T> == 2, bfloat16, float>;  // of scores: float16 is widened
constexpr int most_vectors(int rows) {
    int vectors = 4;
    while (rows * vectors > REGISTERS - REGISTERS / 4) vectors /= 2;
    return vectors;
}

// Calls `what` with 1 to 8 as a constant.
template <class Function>
inline void with_constant(int n, Function what) {
    switch (n) {
        case 1: return what(std::integral_constant<int, 1>());
        case 2: return what(std::integral_constant<int, 2>());
        case 3: return what(std::integral_constant<int, 3>());
        case 4: return what(std::integral_constant<int, 4>());
        case 5: return what(std::integral_constant<int, 5>());
        case 6: return what(std::integral_constant<int, 6>());
        case 7: return what(std::integral_constant<int, 7>());
        default: return what(std::integral_constant<int, 8>());
    }
}

// How matrix units sum: of sixteen words the first numbers by themselves and the second ones, then both, then on to the rest.
struct Chains {
    Lanes first{}, second{}, total{};

    void add(Words pairs, uint32_t word) {
        first = fused(as_lanes(low_halves(pairs)), as_lanes(low_halves(all_words(word))), first);
        second = fused(as_lanes(high_halves(pairs)), as_lanes(high_halves(all_words(word))), second);
    }
    void join() { total += first + second, first = Lanes{}, second = Lanes{}; }
};
inline Lanes total_of(Lanes sum) { return sum; }
inline Lanes total_of(const Chains& sum) { return sum.total; }

// Scores of R rows and the keys [low, high), some more, of a tile whose keys are gathered.
template <class T, int R, int V>
inline void scores_of(const Tile<T>& tile, int m, int low, int high) {
    const int words = tile.shape.words;
    const uint32_t* query = tile.query + int64_t(m) * words;
    for (int v = low / (WIDTH * V) * V; v * WIDTH < high; v += V) {
        Lanes sum[R][V] = {};
        for (int w = 0; w < words; w++) {
            Words keys[V];
            for (int i = 0; i < V; i++) keys[i] = kept(load_words(tile.keys + w * KEYS + (v + i) * WIDTH));
            for (int r = 0; r < R; r++) {
                const Words word = all_words(query[r * words + w]);
                for (int i = 0; i < V; i++) sum[r][i] = add_product<Factor<T>>(sum[r][i], keys[i], word);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) store_lanes(sum[r][i], tile.scores + (m + r) * KEYS + (v + i) * WIDTH);
    }
}

// The same for the few rows of a single query, of keys where they lie. AS_TILES: see `Chains`
template <class T, int R, bool AS_TILES>
void scores_in_place(const Tile<T>& tile, const T* const* tokens, Ahead<T> ahead, int low, int high) {
    // Vectors at once, since each sum is a chain.
    constexpr int U = std::min((R < 3 ? 4 : R < 5 ? 2 : 1) / (AS_TILES && R > 1 && R < 5 ? 2 : 1), VECTORS);
    using Sum = std::conditional_t<AS_TILES, Chains, Lanes>;
    const int words = tile.shape.words, whole = tile.a.key_dim / (4 * PER_WORD<T>) * 4;
    const int last = (tile.a.key_dim + PER_WORD<T> - 1) / PER_WORD<T>, begin = low / (U * WIDTH) * (U * WIDTH);
    const int lines = ahead.at_each((high - begin + U * WIDTH - 1) / (U * WIDTH) * ((last + 3) / 4));
    for (int t = begin; t < high; t += U * WIDTH) {
        Sum sum[U][R] = {};
        const auto add = [&](int w, int count, auto load) {
            ahead.fetch(lines);
            Words keys[U][4];
            for (int u = 0; u < U; u++)
                load_turned([&](int i) { return load(tokens[t + u * WIDTH + i] + w * PER_WORD<T>); }, keys[u]);
            for (int i = 0; i < count; i++)
                for (int r = 0; r < R; r++) {
                    const uint32_t word = tile.query[r * words + w + i];
                    for (int u = 0; u < U; u++) {
                        if constexpr (AS_TILES)
                            sum[u][r].add(keys[u][i], word);
                        else
                            sum[u][r] = add_product<Factor<T>>(sum[u][r], keys[u][i], all_words(word));
                    }
                }
            if constexpr (AS_TILES)
                if ((w + 4) % TILE == 0 || w + 4 >= last)
                    for (int u = 0; u < U; u++)
                        for (int r = 0; r < R; r++) sum[u][r].join();
        };
        for (int w = 0; w < whole; w += 4) add(w, 4, [](const T* from) { return load_quarter(from); });
        if (whole < last)
            add(whole, last - whole, [&](const T* from) {
                return load_quarter(from, tile.a.key_dim - whole * PER_WORD<T>);
            });
        for (int u = 0; u < U; u++)
            for (int r = 0; r < R; r++) store_lanes(total_of(sum[u][r]), tile.scores + r * KEYS + t + u * WIDTH);
    }
}

// Lanes [first, last); the others are further down than any number.
inline Lanes only(Lanes v, int first, int last) {
    return (LANE_NUMBERS >= first) & (LANE_NUMBERS < last) ? v : all_lanes(-__builtin_inff());
}

// Scores of R rows become weights of the keys [low, high) and 0 elsewhere; what was summed is to shrink.
template <int R, bool ALL>
inline void weigh(const Attention& a, float* scores, int low, int high, float* total, float* top, float* shrink) {
    constexpr int PADDED = (R + WIDTH - 1) / WIDTH * WIDTH;
    alignas(64) float before[PADDED] = {}, now[PADDED] = {};
    Lanes added[R];
    const float factor = a.softcap > 0 ? a.softcap * LOG2_E : a.scale * LOG2_E;
    for (int r = 0; r < R; r++) {
        Lanes v[VECTORS];
        for (int i = 0; i < VECTORS; i++) v[i] = load_lanes(scores + r * KEYS + i * WIDTH);
        if (a.softcap > 0)
            for (int i = 0; i < VECTORS; i++) v[i] = tangent(v[i] * all_lanes(a.scale / a.softcap));
        if (!ALL)
            for (int i = 0; i < VECTORS; i++) v[i] = only(v[i], low - i * WIDTH, high - i * WIDTH);
        Lanes most = v[0];
        for (int i = 1; i < VECTORS; i++) most = larger(most, v[i]);
        most = larger(greatest(most) * all_lanes(factor), all_lanes(top[r]));
        before[r] = top[r], now[r] = most[0];
        for (int i = 0; i < VECTORS; i++) {
            v[i] = power_of_two(fused(v[i], all_lanes(factor), -most));
            store_lanes(v[i], scores + r * KEYS + i * WIDTH);
            added[r] = i ? added[r] + v[i] : v[i];
        }
    }
    for (int r = 0; r < PADDED; r += WIDTH)
        store_lanes(power_of_two(load_lanes(before + r) - load_lanes(now + r)), shrink + r);
    for (int r = 0; r < R; r++) {
        store_lanes(fused(load_lanes(total + r * WIDTH), all_lanes(shrink[r]), added[r]), total + r * WIDTH);
        top[r] = now[r];
    }
}

// Scores of R rows fall with the distance of each key from the row's query (ALiBi), before they are scaled.
template <class T, int R>
inline void add_slopes(const Tile<T>& tile, int m) {
    const int group = tile.shape.group;
    for (int r = 0; r < R; r++) {
        const float slope = tile.a.slopes[tile.item.kv_head * group + (m + r) % group] / tile.a.scale;
        const int first = tile.start - tile.item.position - (m + r) / group;
        for (int i = 0; i < VECTORS; i++) {
            float* scores = tile.scores + (m + r) * KEYS + i * WIDTH;
            Lanes far;
            for (int t = 0; t < WIDTH; t++) far[t] = float(first + i * WIDTH + t);
            store_lanes(fused(far, all_lanes(slope), load_lanes(scores)), scores);
        }
    }
}

// S vectors of words of a value as float32, of which `there` numbers are there.
template <class T, int S>
inline void load_value(const T* value, int there, Lanes* numbers) {
    if (S > 1 || there >= WIDTH * PER_WORD<T>)
        for (int s = 0; s < S; s++)
            widen<T>(kept(load_words(value + s * WIDTH * PER_WORD<T>)), numbers + s * PER_WORD<T>);
    else
        widen<T>(load_words(value, there), numbers);
}

// The value of the key t, by each row's weight, from number `d` on.
template <class T, int R, int S>
inline void add_value(const Tile<T>& tile, int m, int t, int d, int there, Lanes (&sum)[R][S * PER_WORD<T>]) {
    constexpr int V = S * PER_WORD<T>;
    const float* weights = tile.scores + m * KEYS + t;
    Lanes numbers[V];
    load_value<T, S>(tile.values[t] + tile.value_offset + d, there, numbers);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = fused(numbers[v], all_lanes(weights[r * KEYS]), sum[r][v]);
}

// Values of the keys [low, high) are added to the sums of R rows: S vectors of words from number `d` on, of which `there`
// numbers are there.
template <class T, int R, int S>
inline void add_values(const Tile<T>& tile, int m, int low, int high, int d, int there, const float* shrink) {
    constexpr int V = S * PER_WORD<T>;
    const int width = tile.shape.width;
    float* sums = tile.state.sums + int64_t(m) * width + d;
    Lanes sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = load_lanes(sums + r * width + v * WIDTH) * all_lanes(shrink[r]);
    for (int t = low; t < high; t++) add_value<T, R, S>(tile, m, t, d, there, sum);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store_lanes(sum[r][v], sums + r * width + v * WIDTH);
}

#if HAS_TILES

// The same as matrix units do it, of weights in bfloat16: of each 32 keys those at even and at odd places by themselves,
// then both.
template <class T, int R, int S>
inline void add_values_as_tiles(const Tile<T>& tile, int m, int low, int high, int d, int there, const float* shrink) {
    constexpr int V = S * PER_WORD<T>;
    const int width = tile.shape.width;
    float* sums = tile.state.sums + int64_t(m) * width + d;
    for (int from = low / (2 * TILE) * (2 * TILE); from < high; from += 2 * TILE) {
        Lanes chains[2][R][V] = {};
        for (int t = std::max(from, low / 2 * 2); t < std::min(from + 2 * TILE, high); t += 2) {
            if (t >= low) add_value<T, R, S>(tile, m, t, d, there, chains[0]);
            if (t + 1 < high) add_value<T, R, S>(tile, m, t + 1, d, there, chains[1]);
        }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) {
                float* sum = sums + r * width + v * WIDTH;
                // No compiler may make one operation of the two.
                const Lanes before = from <= low ? kept(load_lanes(sum) * all_lanes(shrink[r])) : load_lanes(sum);
                store_lanes(before + (chains[0][r][v] + chains[1][r][v]), sum);
            }
    }
}

template <class T, int R>
inline void add_values_as_tiles(const Tile<T>& tile, int m, int low, int high, const float* shrink) {
    constexpr int S = R < 3 ? 2 : 1, NUMBERS = WIDTH * PER_WORD<T>;
    float* weights = tile.scores + m * KEYS;
    for (int i = 0; i < R * KEYS; i += WIDTH)
        store_lanes(as_lanes(high_halves((Words)rounded_to_bfloat16(load_lanes(weights + i)))), weights + i);
    int d = 0;
    for (; d + S * NUMBERS <= tile.a.value_dim; d += S * NUMBERS)
        add_values_as_tiles<T, R, S>(tile, m, low, high, d, S * NUMBERS, shrink);
    for (; d < tile.a.value_dim; d += NUMBERS)
        add_values_as_tiles<T, R, 1>(tile, m, low, high, d, tile.a.value_dim - d, shrink);
}

#endif

// R rows, all of which see the keys [low, high) of a tile, or all of it.
template <class T, int R, bool ALL>
inline void block(const Tile<T>& tile, int m, int low, int high) {
    constexpr int V = most_vectors(R), S = V / PER_WORD<T> ? V / PER_WORD<T> : 1;
    constexpr int FEW = R < 3 ? V : R > 3 && PER_WORD<T> == 1 ? 1 : V / 2;  // enough chains, not too many keys unseen
    if (tile.keys) scores_of<T, R, ALL ? V : FEW>(tile, m, low, high);
    if (tile.a.slopes) add_slopes<T, R>(tile, m);
    alignas(64) float shrink[(R + WIDTH - 1) / WIDTH * WIDTH];
    weigh<R, ALL>(tile.a, tile.scores + m * KEYS, low, high, tile.state.total + m * WIDTH, tile.state.top + m, shrink);
#if HAS_TILES
    if constexpr (std::is_same_v<T, bfloat16>)
        if (tile.shape.is_in_tiles) return add_values_as_tiles<T, R>(tile, m, low, high, shrink);
#endif
    constexpr int NUMBERS = WIDTH * PER_WORD<T>;
    int d = 0;
    for (; d + S * NUMBERS <= tile.a.value_dim; d += S * NUMBERS)
        add_values<T, R, S>(tile, m, low, high, d, S * NUMBERS, shrink);
    for (; d < tile.a.value_dim; d += NUMBERS)
        add_values<T, R, 1>(tile, m, low, high, d, tile.a.value_dim - d, shrink);
}

// Blocks of nearly equal size, none of them of a row or two beside others of six.
template <class T>
void rows_of_tile(const Tile<T>& tile, int begin, int end, int low, int high) {
    const int blocks = (end - begin + ROWS - 1) / ROWS;
    for (int b = 0; b < blocks; b++) {
        const int from = begin + (end - begin) * b / blocks, to = begin + (end - begin) * (b + 1) / blocks;
        with_constant(to - from, [&](auto rows) {
            constexpr int R = std::min<int>(rows, ROWS);
            if (low == 0 && high == KEYS)
                block<T, R, true>(tile, from, low, high);
            else
                block<T, R, false>(tile, from, low, high);
        });
    }
}

// Keys [from, to) of a tile as columns.
template <class T>
void gather_keys(const Attention& a, const Shape& shape, int from, int to, Room<T>& room) {
    float* keys = room.keys.of(int64_t(shape.words + 3) * KEYS);
    alignas(16) static const T nothing[4 * PER_WORD<T>] = {};
    for (int t = from / WIDTH * WIDTH; t < to; t += WIDTH)
        for (int w = 0; w < shape.words; w += 4) {
            const int there = std::min(4 * PER_WORD<T>, a.key_dim - w * PER_WORD<T>);
            Words square[4];
            load_turned(
                [&](int i) {
                    if (t + i < from || t + i >= to || there <= 0) return load_quarter(nothing);
                    const T* key = room.tokens[t + i] + w * PER_WORD<T>;
                    return there == 4 * PER_WORD<T> ? load_quarter(key) : load_quarter(key, there);
                },
                square);
            for (int i = 0; i < 4; i++) store_lanes(as_lanes(square[i]), keys + int64_t(w + i) * KEYS + t);
        }
}

// Values of the keys [from, to), side by side. `tokens` points to them from then on.
template <class T>
void gather_values(const Attention& a, const Shape& shape, int from, int to, Room<T>& room) {
    T* values = reinterpret_cast<T*>(room.values.of(int64_t(KEYS) * shape.width));
    for (int t = from; t < to; t++) {
        T* value = values + t * shape.width;
        std::memcpy(static_cast<void*>(value), room.tokens[t] + a.value_offset, a.value_dim * sizeof(T));
        room.tokens[t] = value;
    }
}

}  // namespace
