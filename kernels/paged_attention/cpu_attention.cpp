// Paged attention, and writing new tokens to their pages, on a CPU. Plain C ABI; see paged_attention/cpu.py.
//
//     queries.h            what a step asks, and which keys a query sees
//     states.h             what has been summed for a query
//     tile.h               where the tokens of a tile lie, and what is fetched meanwhile
//     in_vectors.h, in_matrix_units.h    the work on a tile, in either
//     this file            a tile, a segment, an item, and all of them
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
#include <cstring>
#include <vector>

#include "in_matrix_units.h"
#include "in_vectors.h"
#include "queries.h"
#include "states.h"
#include "tile.h"

extern "C" {

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

constexpr int ITEM_ROWS = 384;  // what is summed for them should stay in a core's second cache
constexpr int LEAST_ROWS = 48;
constexpr int LEAST_PARTS = 3;  // of the work, for each thread, if it can be cut

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
