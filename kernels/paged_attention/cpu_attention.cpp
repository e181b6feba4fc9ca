// Paged attention, and writing new tokens to their pages, on a CPU. Plain C ABI; see paged_attention/cpu.py.
//
// What a query reads is summed in one order, given by its position, the keys it sees and the layer alone: the same bits
// come out for one query as for a thousand, on one thread as on many, wherever a prompt was cut and pages lie.
//
//     tile       64 keys, from a multiple of 64. Each score is summed over the numbers of a key from first to last; then a
//                new maximum, what was summed is rescaled, weights = 2^(score - maximum), and values are added key by key
//     segment    512 keys, from a multiple of 512: a maximum, a total and sums of its own
//     result     the segments, merged from first to last
//
// What a query does not see has no part in its sums and no place in its maximum: its bytes may be NaN.
//
// Work is cut into items: some queries of a row, with the query heads that share a kv head, are the rows of products whose
// lanes are keys (scores) and numbers of a value (sums). A single query turns keys around in registers and reads values
// where they lie; many queries gather both first. Long items are cut further, between segments, where threads are idle.
//
// What a single query reads comes from memory, so it takes several kv heads at once, tile after tile: all that a page has of
// them is read in a line, which is several times as fast as the parts of one head.
//
// Where the processor has matrix units (`tiles.h`), both products of bfloat16 are theirs: weights become bfloat16, and what a
// query does not see weighs zero. Keys of a single query are rows of theirs where they lie, if sixteen of a page are a tile;
// else its products are done in vectors, in the very order of those units.

#include <omp.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "functions.h"
#include "tiles.h"

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

struct Attend {
    const Step* step;
    Layer layer;
};

struct Write {
    const Step* step;
    const void *key, *value;   // [T, K, Dk] and [T, K, Dv], last axes dense
    void* pages;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t page_stride, page_token_stride, page_head_stride;
    int32_t kv_heads, key_bytes, value_bytes, itemsize;
};

}  // extern "C"

namespace {

struct Attention : Step, Layer {};

constexpr int KEYS = 64, SEGMENT = 512;  // these two are part of the order
constexpr int VECTORS = KEYS / WIDTH;
constexpr int ROWS = 6;                  // of a product whose sums stay in registers
constexpr int DIRECT_ROWS = REGISTERS / 4;  // beside a square of keys that is turned around
constexpr int ITEM_ROWS = 384;           // what is summed for them should stay in a core's second cache
constexpr int LEAST_ROWS = 48;
constexpr int LEAST_PARTS = 3;           // of the work, for each thread, if it can be cut
constexpr float LOG2_E = 1.44269504f, NOWHERE = -3e38f;

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

// ---- What a query sees

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

// ---- What is summed

struct State {  // of some rows
    float *sums, *total, *top;  // [rows][width]; [rows][WIDTH], to be added up; [rows]
};

inline int rounded_up(int number, int unit) { return (number + unit - 1) / unit * unit; }

struct Shape {
    int group, words, width;  // words of a key; numbers of a value, with those that fill its last vector
    bool is_in_tiles;         // whether products are those of matrix units, which read whole tiles

    template <class T>
    static Shape of(const Attention& a) {
        const int words = (a.key_dim + PER_WORD<T> - 1) / PER_WORD<T>, group = a.heads / a.kv_heads;
#if HAS_TILES
        if (std::is_same_v<T, bfloat16> && may_use_tiles())
            return {group, rounded_up(words, TILE), rounded_up(a.value_dim, COLUMNS), true};
#endif
        return {group, words, rounded_up(a.value_dim, WIDTH * PER_WORD<T>), false};
    }
    int64_t state_size(int rows) const { return int64_t(rows) * (width + WIDTH) + (rows + WIDTH - 1) / WIDTH * WIDTH; }
    State state(float* room, int rows) const {
        return {room, room + int64_t(rows) * width, room + int64_t(rows) * (width + WIDTH)};
    }
};

void clear(const Shape& shape, State state, int rows) {
    std::fill(state.sums, state.sums + int64_t(rows) * shape.width, 0.0f);
    std::fill(state.total, state.total + rows * WIDTH, 0.0f);
    std::fill(state.top, state.top + rows, NOWHERE);
}

inline float power_of_two(float x) { return power_of_two(all_lanes(x))[0]; }

// The next segment enters what the ones before it have summed. A segment of which a row has seen nothing changes nothing.
__attribute__((noinline)) void merge(const Shape& shape, State into, State segment, int rows) {
    for (int m = 0; m < rows; m++) {
        if (segment.top[m] == NOWHERE) continue;
        float *sums = into.sums + int64_t(m) * shape.width, *total = into.total + m * WIDTH;
        const float *more = segment.sums + int64_t(m) * shape.width, *added = segment.total + m * WIDTH;
        if (into.top[m] == NOWHERE) {
            std::copy(more, more + shape.width, sums), std::copy(added, added + WIDTH, total);
            into.top[m] = segment.top[m];
            continue;
        }
        const float top = std::max(into.top[m], segment.top[m]);
        const Lanes old = all_lanes(power_of_two(into.top[m] - top)), now = all_lanes(power_of_two(segment.top[m] - top));
        for (int d = 0; d < shape.width; d += WIDTH)
            store_lanes(fused(load_lanes(sums + d), old, load_lanes(more + d) * now), sums + d);
        store_lanes(fused(load_lanes(total), old, load_lanes(added) * now), total);
        into.top[m] = top;
    }
}

template <class T>
void finish(const Attention& a, const Shape& shape, const Item& item, State state) {
    for (int m = 0; m < item.count * shape.group; m++) {
        const int head = item.kv_head * shape.group + m % shape.group;
        const float total = sum_of_lanes(state.total + m * WIDTH);
        float weight = total > 0 ? 1.0f / total : 0.0f;
        if (a.sinks) {  // one logit more, without a value
            const float sink = a.sinks[head] * LOG2_E, top = std::max(state.top[m], sink);
            const float shrink = power_of_two(state.top[m] - top);
            weight = shrink / fused(all_lanes(total), all_lanes(shrink), all_lanes(power_of_two(sink - top)))[0];
        }
        const float* sums = state.sums + int64_t(m) * shape.width;
        T* out = static_cast<T*>(a.out) + ((item.token + m / shape.group) * a.heads + head) * a.value_dim;
        for (int d = 0; d < a.value_dim; d += WIDTH * PER_WORD<T>) {
            Lanes numbers[PER_WORD<T>];
            for (int i = 0; i < PER_WORD<T>; i++) numbers[i] = load_lanes(sums + d + i * WIDTH) * all_lanes(weight);
            narrow(numbers, out + d, a.value_dim - d);
        }
    }
}

// ---- A tile

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

// Values of the keys [low, high) are added to the sums of R rows: S vectors of words from number `d` on, of which `there`
// numbers are there.
template <class T, int R, int S>
inline void add_values(const Tile<T>& tile, int m, int low, int high, int d, int there, const float* shrink) {
    constexpr int V = S * PER_WORD<T>;
    const int width = tile.shape.width;
    float* sums = tile.state.sums + int64_t(m) * width + d;
    const float* weights = tile.scores + m * KEYS;
    Lanes sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = load_lanes(sums + r * width + v * WIDTH) * all_lanes(shrink[r]);
    for (int t = low; t < high; t++) {
        const T* value = tile.values[t] + tile.value_offset + d;
        Lanes numbers[V];
        load_value<T, S>(value, there, numbers);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++)
                sum[r][v] = fused(numbers[v], all_lanes(weights[r * KEYS + t]), sum[r][v]);
    }
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
    const float* weights = tile.scores + m * KEYS;
    for (int from = low / (2 * TILE) * (2 * TILE); from < high; from += 2 * TILE) {
        Lanes chains[2][R][V] = {};
        const auto add = [&](int t, auto place) {
            const T* value = tile.values[t] + tile.value_offset + d;
            Lanes numbers[V];
            load_value<T, S>(value, there, numbers);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < V; v++)
                    chains[place][r][v] = fused(numbers[v], all_lanes(weights[r * KEYS + t]), chains[place][r][v]);
        };
        for (int t = std::max(from, low / 2 * 2); t < std::min(from + 2 * TILE, high); t += 2) {
            if (t >= low) add(t, std::integral_constant<int, 0>());
            if (t + 1 < high) add(t + 1, std::integral_constant<int, 1>());
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

// ---- A tile in matrix units

#if HAS_TILES

constexpr int PAIRS = KEYS / 2;
static_assert(KEYS == COLUMNS && WIDTH == TILE, "a tile of keys is a panel");

// Values of the keys [from, to) as panels of 64 numbers: a word has a number of two keys. The even numbers of each 32 come
// first, as in all sums. CHECKS: returns whether all are finite
template <class T, bool CHECKS>
bool pair_values(const Attention& a, const Shape& shape, int from, int to, Ahead<T> ahead, Room<T>& room) {
    float* panels = room.values.of(int64_t(PAIRS) * shape.width);
    const Words exponents = all_words(0x7F807F80u);
    constexpr __mmask32 UPPER = 0xAAAAAAAAu;
    __mmask32 endless = 0;
    const int lines = ahead.at_each(PAIRS);
    for (int t = 0; t < KEYS; t += 2) {
        ahead.fetch(lines);
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
// once. seen(m): what a row sees
template <class T, class Function>
void rows_in_tiles(const Tile<T>& tile, int begin, int end, Room<T>& room, Function seen) {
    const Shape& shape = tile.shape;
    const float* values = room.values.of(0);
    const int blocks = (end - begin + Tiles::MOST_ROWS - 1) / Tiles::MOST_ROWS;
    alignas(64) bfloat16 weights[Tiles::MOST_ROWS * KEYS];
    alignas(64) float shrink[Tiles::MOST_ROWS + WIDTH];
    const auto fetch_nothing = [] {};
    for (int b = 0; b < blocks; b++) {
        const int from = begin + (end - begin) * b / blocks, to = begin + (end - begin) * (b + 1) / blocks;
        const TileRows query{tile.query + int64_t(from) * shape.words, shape.words * 4, to - from};
        float* to_scores = tile.scores + int64_t(from) * KEYS;
        if (tile.keys) room.tiles.multiply(query, tile.keys, shape.words, true, to_scores, KEYS, fetch_nothing);
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
            room.tiles.multiply(rows, reinterpret_cast<const uint32_t*>(values) + int64_t(d) * PAIRS, PAIRS, false, sums + d,
                                shape.width, fetch_nothing);
    }
}

// Whether an item's keys are read where they lie, sixteen tokens as a tile: those of a single query.
inline bool reads_tiles_of_keys(const Attention& a, const Shape& shape, const Item& item) {
    const bool lie_in_tiles = a.block_tokens % TILE == 0 && a.key_dim == PER_WORD<bfloat16> * shape.words;
    return shape.is_in_tiles && item.count == 1 && shape.group <= TILE && lie_in_tiles;
}

// Scores of a single query's few rows, of keys where they lie. A tile's keys that are not seen have scores that are not read.
// head: which of the item's
template <class T>
void scores_where_keys_lie(const Tile<T>& tile, int head, int from, int to, Room<T>& room) {
    const int rows = tile.shape.group, begin = from / TILE * TILE;
    const void* first[KEYS / TILE];
    for (int t = begin; t < to; t += TILE) {
        const int known = std::max(t, from);
        first[(t - begin) / TILE] = room.tokens[known] - (known - t) * tile.a.page_token_stride;
    }
    const uint32_t* columns = reinterpret_cast<const uint32_t*>(room.columns.of(0)) + head * tile.shape.words * TILE;
    alignas(64) float by_key[KEYS * TILE];
    room.tiles.meet_columns(first, (to - begin + TILE - 1) / TILE, tile.a.page_token_stride * sizeof(T), columns, rows,
                            tile.shape.words, by_key);
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
    if (!is_direct) gather_keys(a, shape, from, to, room);
    // A single query sees all of these, so that what is no number is one in its sums.
    const bool is_finite = item.count == 1 ? pair_values<T, false>(a, shape, from, to, ahead, room)
                                           : pair_values<T, true>(a, shape, from, to, ahead, room);
    const Tile<T> tile{a, shape, reinterpret_cast<const uint32_t*>(room.query.of(0)) + int64_t(head) * rows * shape.words,
                       is_direct ? nullptr : reinterpret_cast<const uint32_t*>(room.keys.of(0)), room.tokens, 0,
                       room.scores.of(int64_t(rows) * KEYS), state, item, start};
    if (is_direct) scores_where_keys_lie(tile, head, from, to, room);
    const auto seen_by = [&](int m) { return a.is_causal ? seen_of_tile(a, item, m / shape.group, start) : Span{from, to}; };
    const Span some = a.is_causal ? queries_that_see(a, item, start, start + KEYS - 1) : Span{0, item.count};
    if (is_finite) return rows_in_tiles(tile, some.begin * shape.group, some.end * shape.group, room, seen_by);
    // What is no number would be one in no sum, even where it weighs zero: each query has the values that it sees.
    for (int m = some.begin * shape.group; m < some.end * shape.group; m += shape.group) {
        const Span seen = seen_by(m);
        pair_values<T, false>(a, shape, seen.begin, seen.end, ahead, room);
        rows_in_tiles(tile, m, m + shape.group, room, seen_by);
    }
}

#endif

// The tile that begins at `start`, of whose keys those at [from, to) are seen. head: which of the item's heads, all of which
// are computed in turn; `item` is of this one
template <class T>
void do_tile(const Attention& a, const Shape& shape, const Item& item, int head, int start, int from, int to,
             Ahead<T> ahead, Room<T>& room, State state) {
    const int rows = item.count * shape.group;
    locate(a, item, start, from, to, room.tokens);
    const bool is_direct = item.count == 1 && rows <= DIRECT_ROWS;
    if (item.count == 1) fill_up(room.tokens, from - start, to - start);
#if HAS_TILES
    if constexpr (std::is_same_v<T, bfloat16>)
        if (shape.is_in_tiles && (!is_direct || reads_tiles_of_keys(a, shape, item)))
            return in_matrix_units(a, shape, item, head, start, from - start, to - start, ahead, room, state);
#endif
    const uint32_t* query = reinterpret_cast<const uint32_t*>(room.query.of(0)) + int64_t(head) * rows * shape.words;
    Tile<T> tile{a, shape, query, nullptr, room.tokens, a.value_offset, room.scores.of(int64_t(rows) * KEYS), state, item, start};
    if (is_direct) {
        with_constant(rows, [&](auto count) {
            constexpr int R = std::min<int>(count, DIRECT_ROWS);
            if (shape.is_in_tiles)
                scores_in_place<T, R, HAS_TILES && PER_WORD<T> == 2>(tile, room.tokens, ahead, from - start, to - start);
            else
                scores_in_place<T, R, false>(tile, room.tokens, ahead, from - start, to - start);
        });
        return rows_of_tile(tile, 0, rows, from - start, to - start);
    }
    gather_keys(a, shape, from - start, to - start, room);
    gather_values(a, shape, from - start, to - start, room);
    tile.keys = reinterpret_cast<const uint32_t*>(room.keys.of(0)), tile.value_offset = 0;
    if (!a.is_causal) return rows_of_tile(tile, 0, rows, from - start, to - start);
    // Those that see some of it, among them those that see all of it.
    const auto [some, some_end] = queries_that_see(a, item, start, start + KEYS - 1);
    const int all = std::clamp(start + KEYS - 1 - item.position, some, item.count);
    const int all_end = std::clamp(last_to_see(a, start) + 1 - item.position, all, item.count);
    for (int q = some; q < some_end; q++) {
        if (q == all && all < all_end) {
            rows_of_tile(tile, all * shape.group, all_end * shape.group, 0, KEYS);
            q = all_end - 1;
            continue;
        }
        const Span seen = seen_of_tile(a, item, q, start);
        rows_of_tile(tile, q * shape.group, (q + 1) * shape.group, seen.begin, seen.end);
    }
}

// ---- An item, and all of them

// The item as it is for one of its heads.
inline Item of_head(const Item& item, int head) {
    Item own = item;
    own.kv_head += head, own.kv_heads = 1;
    return own;
}

// The item's queries, side by side, head by head; what is no number of theirs is zero.
template <class T>
void fetch(const Attention& a, const Shape& shape, const Item& item, Room<T>& room) {
    const int rows = item.count * shape.group;
    float* query = room.query.of(int64_t(item.kv_heads) * rows * shape.words + WIDTH);
    for (int m = 0; m < item.kv_heads * rows; m++) {
        const int head = item.kv_head + m / rows, row = m % rows;
        const T* from = static_cast<const T*>(a.query) + (item.token + row / shape.group) * a.query_token_stride +
                        (head * shape.group + row % shape.group) * a.query_head_stride;
        for (int w = 0; w < shape.words; w += WIDTH) {
            const Lanes words = as_lanes(load_words(from + w * PER_WORD<T>, a.key_dim - w * PER_WORD<T>));
            float* to = query + int64_t(m) * shape.words + w;  // the next row, or room to spare, is behind it
            store_lanes(words, to);
        }
    }
#if HAS_TILES
    if (!reads_tiles_of_keys(a, shape, item)) return;
    float* columns = room.columns.of(int64_t(item.kv_heads) * shape.words * TILE);
    for (int m = 0; m < item.kv_heads * rows; m++)
        for (int w = 0; w < shape.words; w++)
            columns[(m / rows * shape.words + w) * TILE + m % rows] = query[m * shape.words + w];
#endif
}

// States of an item's heads, one after another.
struct States {
    const Shape& shape;
    float* room;
    int heads, rows;  // rows of each

    static int64_t size(const Shape& shape, const Item& item) {
        return item.kv_heads * shape.state_size(item.count * shape.group);
    }
    State of(int head) const { return shape.state(room + head * shape.state_size(rows), rows); }
    void clear() const {
        for (int h = 0; h < heads; h++) ::clear(shape, of(h), rows);
    }
    void merge(const States& segment) const {
        for (int h = 0; h < heads; h++) ::merge(shape, of(h), segment.of(h), rows);
    }
};

inline States states_of(const Shape& shape, const Item& item, float* room) {
    return {shape, room, item.kv_heads, item.count * shape.group};
}

template <class T>
void finish(const Attention& a, const Shape& shape, const Item& item, const States& states) {
    for (int h = 0; h < item.kv_heads; h++) finish<T>(a, shape, of_head(item, h), states.of(h));
}

template <class T>
void do_segment(const Attention& a, const Shape& shape, const Item& item, int from, int to, Room<T>& room, States states) {
    states.clear();
    for (int start = from / KEYS * KEYS; start < to; start += KEYS) {
        room.next_seen = {0, 0};
        if (item.count == 1) look_ahead(a, item, start + KEYS, room);
        for (int h = 0; h < item.kv_heads; h++)
            do_tile(a, shape, of_head(item, h), h, start, std::max(start, from), std::min(start + KEYS, to),
                    share_of(room, h, item.kv_heads), room, states.of(h));
    }
}

inline int end_of_segment(const Item& item, int from) { return std::min(item.end, from / SEGMENT * SEGMENT + SEGMENT); }

template <class T>
void do_item(const Attention& a, const Shape& shape, const Item& item, Room<T>& room) {
    const States done = states_of(shape, item, room.done.of(States::size(shape, item)));
    done.clear();
    for (int from = item.begin; from < item.end; from = end_of_segment(item, from)) {
        if (from == item.begin) {
            do_segment(a, shape, item, from, end_of_segment(item, from), room, done);
        } else {
            const States segment = states_of(shape, item, room.segment.of(States::size(shape, item)));
            do_segment(a, shape, item, from, end_of_segment(item, from), room, segment);
            done.merge(segment);
        }
    }
    finish<T>(a, shape, item, done);
}

// Those that see most come first, so that no thread is left alone with one of them.
// single_heads: how many kv heads a single query takes at once
std::vector<Item> items_of(const Attention& a, int item_queries, int single_heads) {
    std::vector<Item> items;
    int64_t token = 0;
    for (int row = 0; row < a.rows; token += a.queries[row++])
        for (int first = 0; first < a.queries[row]; first += item_queries) {
            const int count = std::min(item_queries, a.queries[row] - first), heads = count == 1 ? single_heads : 1;
            const int position = a.kv_len[row] - a.queries[row] + first;
            for (int head = 0; head < a.kv_heads; head += heads)
                items.push_back({row, first, count, head, std::min(heads, a.kv_heads - head), position,
                                 a.is_causal ? oldest(a, position) : 0,
                                 a.is_causal ? position + count : a.kv_len[row], token + first});
        }
    const auto size = [](const Item& item) { return int64_t(item.count) * item.kv_heads * (item.end - item.begin); };
    std::stable_sort(items.begin(), items.end(), [&](const Item& x, const Item& y) { return size(x) > size(y); });
    return items;
}

// Numbers below 2^-126 are zero to matrix units. Where these compute, they are to vectors as well.
class SmallestAreZero {
  public:
#if HAS_TILES
    explicit SmallestAreZero(bool are) : before_(_mm_getcsr()) {
        if (are) _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | 0x40);  // results, and what is read
    }
    ~SmallestAreZero() { _mm_setcsr(before_); }

  private:
    const unsigned before_;
#else
    explicit SmallestAreZero(bool) {}
#endif
};

struct Piece {  // a segment of an item
    int item, from;
    int64_t state;  // where its state lies
};

// Few items are done segment by segment, each of which may go to another thread.
template <class T>
void do_pieces(const Attention& a, const Shape& shape, const std::vector<Item>& items) {
    std::vector<Piece> pieces;
    std::vector<int> first_piece;
    int64_t size = 0;
    for (int n = 0; n < int(items.size()); n++) {
        first_piece.push_back(int(pieces.size()));
        for (int from = items[n].begin; from < items[n].end; from = end_of_segment(items[n], from)) {
            pieces.push_back({n, from, size});
            size += (States::size(shape, items[n]) + 15) / 16 * 16;
        }
    }
    first_piece.push_back(int(pieces.size()));
    Scratch states;
    float* const states_at = states.of(size);
#pragma omp parallel
    {
        const SmallestAreZero smallest(shape.is_in_tiles);
        Room<T> room{};
#pragma omp for schedule(dynamic, 1)
        for (int p = 0; p < int(pieces.size()); p++) {
            const Item& item = items[pieces[p].item];
            fetch(a, shape, item, room);
            do_segment(a, shape, item, pieces[p].from, end_of_segment(item, pieces[p].from), room,
                       states_of(shape, item, states_at + pieces[p].state));
        }
#pragma omp for schedule(dynamic, 1)
        for (int n = 0; n < int(items.size()); n++) {
            const States done = states_of(shape, items[n], room.done.of(States::size(shape, items[n])));
            done.clear();
            for (int p = first_piece[n]; p < first_piece[n + 1]; p++)
                done.merge(states_of(shape, items[n], states_at + pieces[p].state));
            finish<T>(a, shape, items[n], done);
        }
    }
}

// How many kv heads a single query takes at once: all, as long as that leaves each thread some segments.
inline int heads_at_once(const Attention& a, int threads) {
    int segments = 0, heads = a.kv_heads;
    for (int row = 0; row < a.rows; row++) segments += (a.kv_len[row] + SEGMENT - 1) / SEGMENT;
    while (threads > 1 && heads > 1 && segments * ((a.kv_heads + heads - 1) / heads) < LEAST_PARTS * threads)
        heads = (heads + 1) / 2;
    return heads;
}

template <class T>
void attend(const Attention& a) {
    const Shape shape = Shape::of<T>(a);
    const int threads = omp_get_max_threads(), heads = heads_at_once(a, threads);
    int item_queries = std::max(1, ITEM_ROWS / shape.group);
    std::vector<Item> items = items_of(a, item_queries, heads);
    while (threads > 1 && int(items.size()) < LEAST_PARTS * threads && item_queries * shape.group >= 2 * LEAST_ROWS)
        items = items_of(a, item_queries /= 2, heads);
    if (threads > 1 && int(items.size()) < 2 * threads) return do_pieces<T>(a, shape, items);
#pragma omp parallel if (items.size() > 1)
    {
        const SmallestAreZero smallest(shape.is_in_tiles);
        Room<T> room{};
        const int ahead = omp_get_num_threads(), count = int(items.size());
#pragma omp for schedule(dynamic, 1)
        for (int n = 0; n < count; n++) {
            room.next = n + ahead < count ? &items[n + ahead] : nullptr;
            fetch(a, shape, items[n], room);
            do_item(a, shape, items[n], room);
        }
    }
}

}  // namespace

extern "C" {

void intarsia_attend(const Attend* a) {
    const Attention attention{*a->step, a->layer};
    with_kind(a->layer.kind, [&](auto* number) { attend<std::remove_pointer_t<decltype(number)>>(attention); });
}

void intarsia_write(const Write* w) {
    const auto* keys = static_cast<const char*>(w->key);
    const auto* values = static_cast<const char*>(w->value);
    auto* pages = static_cast<char*>(w->pages);
    const int64_t size = w->itemsize;
    const Step& step = *w->step;
#pragma omp parallel for schedule(static) if (step.tokens > 256)
    for (int t = 0; t < step.tokens; t++)
        for (int h = 0; h < w->kv_heads; h++) {
            char* to = pages + size * (step.page[t] * w->page_stride + step.offset[t] * w->page_token_stride +
                                       h * w->page_head_stride);
            std::memcpy(to, keys + size * (t * w->key_token_stride + h * w->key_head_stride), w->key_bytes);
            std::memcpy(to + w->key_bytes,
                        values + size * (t * w->value_token_stride + h * w->value_head_stride), w->value_bytes);
        }
}

}  // extern "C"
