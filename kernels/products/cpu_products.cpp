// Products of tokens with constant weights, on a CPU: out[r][n] = sum over k of x[r][k] * weight[n][k]. Plain C ABI; see
// products/cpu.py.
//
// Weights are packed once, into panels of 64 outputs. A panel is a run of steps; a step holds one 32-bit word of each of
// the 64 outputs: one float32, or two bfloat16 that are neighbours along k. A row of x is the same words, side by side.
//
//     panel   [steps][64 outputs] words                one line of memory from its beginning to its end
//     block   [rows <= MOST_ROWS][64 outputs] sums     in registers: per step, each row's word meets all 64
//
// The lanes of a vector are outputs, so each sum runs over k from first to last, in one order: for one row as for a
// thousand, whichever thread computes it, however rows are put into blocks and k is cut. Where the processor has matrix
// units, products of bfloat16 are theirs, for one row as for a thousand (`tiles.h`).

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "panels.h"
#include "tiles.h"

namespace {

constexpr int64_t FEW_STEPS = 64;  // of a panel: 16 KiB, which stay in a core's first cache
// That stay in a cache for all rows: the second one, unless blocks go through them more than once.
constexpr int64_t CACHED_STEPS = most_vectors(MOST_ROWS) == STEP_LANES ? 1024 : FEW_STEPS;
constexpr int LINE_WORDS = LINE_BYTES / 4, STEP_LINES = OUTPUTS / LINE_WORDS;  // of a cache line; lines of a step

template <class T>
constexpr int NUMBERS = 4 / sizeof(T);  // of a word

// Steps of a panel that a thread will read, whole.
struct Place {
    const uint32_t* words = nullptr;
    int64_t steps = 0;
};

// What is fetched while a block is computed: some lines at each of so many times, so that all is there in time. every: one
// of so many, where the processor fetches their neighbours by itself
class Ahead {
  public:
    Ahead(Place place, int64_t times, int every = 1)
        : at_(place.words), left_(place.steps * STEP_LINES), each_((left_ + times - 1) / times), every_(every) {}

    void fetch() {
        if (left_ <= 0) return;
        for (int64_t n = 0; n < each_; n += every_) prefetch_far(at_ + n * LINE_WORDS);
        at_ += each_ * LINE_WORDS, left_ -= each_;
    }

  private:
    const uint32_t* at_;
    int64_t left_;
    const int64_t each_;
    const int every_;
};

// Numbers of x that a word of a panel meets one after the other: two, where no instruction multiplies pairs. Then the rows
// of x are float32.
template <class T>
constexpr int MEETINGS = IS_SPLIT<T> ? 2 : 1;

// sums[r][v] over the steps of a panel, for R rows and V vectors of outputs.
template <class T, int R, int V>
inline void block(const uint32_t* const* x, int64_t from, const uint32_t* panel, int64_t steps, float* sums,
                  Ahead& ahead) {
    using Met = std::conditional_t<IS_SPLIT<T>, float, T>;
    constexpr int M = MEETINGS<T>;
    Lanes total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = load_lanes(sums + r * OUTPUTS + v * WIDTH);
    for (int64_t s = 0; s < steps; s++) {
        ahead.fetch();
        for (int m = 0; m < M; m++) {
            Words weight[V];
            for (int v = 0; v < V; v++) weight[v] = met_words<T>(load_words(panel + s * OUTPUTS + v * WIDTH), m);
            for (int r = 0; r < R; r++) {
                const Words word = all_words(x[r][(from + s) * M + m]);
                for (int v = 0; v < V; v++) total[r][v] = add_product<Met>(total[r][v], weight[v], word);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store_lanes(total[r][v], sums + r * OUTPUTS + v * WIDTH);
}

template <class T, int R>
void rows_of_block(const Work& work, const uint32_t* const* x, int64_t from, const uint32_t* panel, int64_t steps,
                   float* sums, Ahead& ahead) {
    constexpr int V = most_vectors(R), HALF = std::min(V, STEP_LANES / 2);
    if (work.outputs() == OUTPUTS)
        for (int v = 0; v < STEP_LANES; v += V)
            block<T, R, V>(x, from, panel + v * WIDTH, steps, sums + v * WIDTH, ahead);
    else
        for (int v = work.from / WIDTH; v < work.to / WIDTH; v += HALF)
            block<T, R, HALF>(x, from, panel + v * WIDTH, steps, sums + v * WIDTH, ahead);
}

template <class T>
void some_rows(const Work& work, int rows, const uint32_t* const* x, int64_t from, const uint32_t* panel, int64_t steps,
               float* sums, Ahead& ahead) {
    switch (rows) {
        case 1: return rows_of_block<T, 1>(work, x, from, panel, steps, sums, ahead);
        case 2: return rows_of_block<T, 2>(work, x, from, panel, steps, sums, ahead);
        case 3: return rows_of_block<T, 3>(work, x, from, panel, steps, sums, ahead);
        case 4: return rows_of_block<T, 4>(work, x, from, panel, steps, sums, ahead);
        case 5: return rows_of_block<T, 5>(work, x, from, panel, steps, sums, ahead);
        default: return rows_of_block<T, 6>(work, x, from, panel, steps, sums, ahead);
    }
}

struct Room {
    std::vector<uint32_t> decoded;
    std::vector<float> sums;
    std::vector<const uint32_t*> x;
    std::vector<float> wide;  // the numbers of these rows, where they are met as float32
    int64_t first_of_x = -1;
    Tiles tiles;
    std::vector<bfloat16> gathered;  // rows that tiles cannot read as they lie
    int64_t first_gathered = -1;
};

// Steps of a panel that are in the caches while all rows meet them.
struct Part {
    int64_t from, steps;
    bool is_last;
    const uint32_t* words;
    Place next;  // what is read after it
};

template <class T>
int64_t steps_of(const Product& a) {
    return (a.depth + NUMBERS<T> - 1) / NUMBERS<T>;
}

// The beginning of what a thread does next; none of half a panel, which comes last.
template <class T>
Place beginning(const Product& a, const Work* next) {
    if (!next || next->outputs() < OUTPUTS) return {};
    const int64_t steps = steps_of<T>(a), number = next->group * panels_of(a) + next->panel;
    return {static_cast<const uint32_t*>(a.packed) + number * steps * OUTPUTS, std::min(CACHED_STEPS, steps)};
}

// Calls meet(part) for all parts of a panel. Weights in fewer bits are decoded just before.
template <class T, class Function>
void for_each_part(const Product& a, const Work& work, const Work* next, int64_t blocks, Room& room, Function meet) {
    const int64_t steps = steps_of<T>(a), number = work.group * panels_of(a) + work.panel;
    if (a.codes.codes) {
        const int64_t most = blocks == 1 ? FEW_STEPS : CACHED_STEPS, pairs = (a.depth + 1) / 2;
        room.decoded.resize((most + 1) * OUTPUTS);
        for (int64_t from = 0; from < steps; from += most) {
            const int64_t here = std::min(most, steps - from), first = from * NUMBERS<T> / 2;
            const int64_t last = std::min(pairs, ((from + here) * NUMBERS<T> + 1) / 2);
            decode<T>(a.codes, pairs, number, first, last, room.decoded.data());
            meet(Part{from, here, from + here == steps, room.decoded.data(), {}});
        }
        return;
    }
    const bool is_waited_for = work.last - work.first <= STREAMED_ROWS;
    const uint32_t* words = static_cast<const uint32_t*>(a.packed) + number * steps * OUTPUTS;
    for (int64_t from = 0; from < steps; from += CACHED_STEPS) {
        const int64_t here = std::min(CACHED_STEPS, steps - from), end = from + here;
        const Place rest{words + end * OUTPUTS, std::min(CACHED_STEPS, steps - end)};
        const Place soon = !is_waited_for ? Place{} : end < steps ? rest : beginning<T>(a, next);
        meet(Part{from, here, end == steps, words + from * OUTPUTS, soon});
    }
}

// Calls meet(begin, count) for blocks of nearly equal size: none of them is a row or two beside others of six.
template <class Function>
void for_each_block(int64_t rows, int64_t blocks, Function meet) {
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t begin = b * rows / blocks;
        meet(begin, int((b + 1) * rows / blocks - begin));
    }
}

// The rows of x from `first` on as blocks read them. Panel after panel, they are the same.
template <class T>
void rows_of_vectors(const Product& a, int64_t first, int64_t rows, Room& room) {
    const int64_t depth = steps_of<T>(a) * MEETINGS<T>;
    room.first_of_x = first;
    room.x.resize(rows);
    if (IS_SPLIT<T>) room.wide.resize(rows * depth);
    for (int64_t r = 0; r < rows; r++) {
        const T* x = static_cast<const T*>(a.x) + (a.row_of ? a.row_of[first + r] : first + r) * a.x_stride;
        if (IS_SPLIT<T>) {
            float* wide = &room.wide[r * depth];
            int64_t k = 0;
            for (; k + LANES <= a.depth; k += LANES) store(load(x + k), wide + k);
            for (; k < depth; k++) wide[k] = k < a.depth ? to_float(x[k]) : 0.0f;
            room.x[r] = reinterpret_cast<const uint32_t*>(wide);
        } else
            room.x[r] = reinterpret_cast<const uint32_t*>(x);
    }
}

template <class T>
void in_vectors(const Product& a, const Work& work, const Work* next, Room& room) {
    const int64_t first = work.first, rows = work.last - first, blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int most = int((rows + blocks - 1) / blocks), passes = std::max(1, work.outputs() / WIDTH / most_vectors(most));
    room.sums.assign(rows * OUTPUTS, 0.0f);
    if (room.first_of_x != first) rows_of_vectors<T>(a, first, rows, room);
    for_each_part<T>(a, work, next, blocks, room, [&](const Part& part) {
        // What is read once and in a line, the processor fetches by itself: no instruction of ours is as fast.
        Ahead ahead(blocks * passes > 1 ? part.next : Place{}, part.steps * blocks * passes);
        for_each_block(rows, blocks, [&](int64_t begin, int count) {
            float* sums = room.sums.data() + begin * OUTPUTS;
            some_rows<T>(work, count, room.x.data() + begin, part.from, part.words, part.steps, sums, ahead);
            if (part.is_last) write_rows<T>(a, work, first + begin, count, sums);
        });
    });
}

#if HAS_TILES

// The rows of x from `first` on as tiles read them: side by side, and zero behind their last number.
TileRows rows_of_tiles(const Product& a, int64_t first, int64_t rows, Room& room) {
    const bfloat16* x = static_cast<const bfloat16*>(a.x);
    constexpr int64_t SIZE = sizeof(bfloat16), NUMBERS_OF_TILE = 2 * TILE;
    if (!a.row_of && a.depth % NUMBERS_OF_TILE == 0) return {x + first * a.x_stride, a.x_stride * SIZE, 0};
    const int64_t depth = (a.depth + NUMBERS_OF_TILE - 1) / NUMBERS_OF_TILE * NUMBERS_OF_TILE;
    if (room.first_gathered != first) {  // panel after panel, they are the same
        room.first_gathered = first;
        room.gathered.assign(rows * depth, bfloat16{0});
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(static_cast<void*>(&room.gathered[r * depth]),
                        x + (a.row_of ? a.row_of[first + r] : first + r) * a.x_stride, a.depth * SIZE);
    }
    return {room.gathered.data(), depth * SIZE, 0};
}

void in_tiles(const Product& a, const Work& work, const Work* next, Room& room) {
    const int64_t first = work.first, rows = work.last - first, blocks = (rows + Tiles::MOST_ROWS - 1) / Tiles::MOST_ROWS;
    const int most = int((rows + blocks - 1) / blocks);
    const TileRows x = rows_of_tiles(a, first, rows, room);
    room.sums.resize(rows * OUTPUTS);
    for_each_part<bfloat16>(a, work, next, blocks, room, [&](const Part& part) {
        // Rows of one tile read a panel in a line, so that a line of each step is enough.
        Ahead ahead(part.next, blocks * Tiles::fetches(most, part.steps, work.outputs()), most <= TILE ? STEP_LINES : 1);
        for_each_block(rows, blocks, [&](int64_t begin, int count) {
            float* sums = room.sums.data() + begin * OUTPUTS;
            const TileRows here{static_cast<const char*>(x.first) + begin * x.stride_bytes + part.from * 4,
                                x.stride_bytes, count};
            room.tiles.multiply(here, part.words, part.steps, {work.from, work.to}, part.from == 0, sums, OUTPUTS,
                                [&] { ahead.fetch(); });
            if (part.is_last) write_rows<bfloat16>(a, work, first + begin, count, sums);
        });
    });
}

#endif

template <class T>
void product(const Product& a) {
    const int parts = a.packed ? 2 : 1;  // what is decoded is decoded by one thread
    for_each_work<Room>(a, parts, [&](const Work& work, const Work* next, Room& room) {
#if HAS_TILES
        if (std::is_same_v<T, bfloat16> && may_use_tiles()) return in_tiles(a, work, next, room);
#endif
        in_vectors<T>(a, work, next, room);
    });
}

template <class T>
void pack(const T* weight, int64_t stride, uint32_t* packed, int64_t outputs, int64_t depth) {
    const int64_t size = sizeof(T), steps = (depth + NUMBERS<T> - 1) / NUMBERS<T>;
    lay_panels(weight, stride * size, depth * size, outputs, steps, packed, [](uint32_t word) { return word; });
}

template <class T>
void unpack(const uint32_t* packed, const int64_t* rows, int64_t count, T* out, int64_t depth) {
    constexpr int N = NUMBERS<T>;
    const int64_t steps = (depth + N - 1) / N;
#pragma omp parallel for schedule(static) if (count * depth > (1 << 15))
    for (int64_t r = 0; r < count; r++) {
        const int64_t row = rows[r];
        const T* from = reinterpret_cast<const T*>(packed + row / OUTPUTS * steps * OUTPUTS) + row % OUTPUTS * N;
        for (int64_t k = 0; k < depth; k++) out[r * depth + k] = from[k / N * OUTPUTS * N + k % N];
    }
}

// Rows of a weight in fewer bits: out [count, depth]. Neighbours share what is decoded.
template <class T>
void expand(const Product& a, const int64_t* rows, int64_t count, T* out) {
    constexpr int N = NUMBERS<T>;
    const int64_t steps = (a.depth + N - 1) / N, pairs = (a.depth + 1) / 2;
#pragma omp parallel if (count > 1)
    {
        std::vector<uint32_t> words((steps + 1) * OUTPUTS);
        int64_t decoded = -1;
#pragma omp for schedule(dynamic, OUTPUTS)
        for (int64_t r = 0; r < count; r++) {
            if (rows[r] / OUTPUTS != decoded) {
                decoded = rows[r] / OUTPUTS;
                decode<T>(a.codes, pairs, decoded, 0, pairs, words.data());
            }
            const T* from = reinterpret_cast<const T*>(words.data()) + rows[r] % OUTPUTS * N;
            for (int64_t k = 0; k < a.depth; k++) out[r * a.depth + k] = from[k / N * OUTPUTS * N + k % N];
        }
    }
}

// out[r] = sum over j of shares[r][j] * x[row_of[r][j]], from first to last
template <class T>
void combine(const T* x, const int64_t* row_of, const float* shares, T* out, int64_t rows, int64_t count, int64_t width) {
#pragma omp parallel for schedule(static) if (rows * count * width > (1 << 15))
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < width; d += LANES) {
            const int here = int(std::min<int64_t>(LANES, width - d));
            float sums[LANES] = {};
            for (int64_t j = 0; j < count; j++) {
                const T* from = x + row_of[r * count + j] * width + d;
                const float share = shares[r * count + j];
                for (int i = 0; i < here; i++) sums[i] = __builtin_fmaf(share, to_float(from[i]), sums[i]);
            }
            for (int i = 0; i < here; i++) from_float(sums[i], out + r * width + d + i);
        }
}

}  // namespace

extern "C" {

const char* intarsia_vectors() { return VECTORS_NAME; }

int32_t intarsia_has_matrix_units() { return may_use_tiles(); }

void intarsia_product(const Product* a) {
    with_weight(a->kind, [&](auto* number) { product<std::remove_pointer_t<decltype(number)>>(*a); });
}

// weight: [outputs, depth], rows `stride` numbers apart; packed: [panels][steps][64] words
void intarsia_pack(const void* weight, int64_t stride, void* packed, int64_t outputs, int64_t depth, int32_t kind) {
    with_weight(kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        pack(static_cast<const T*>(weight), stride, static_cast<uint32_t*>(packed), outputs, depth);
    });
}

// Codes from rows [outputs][row_bytes] into panels [panels][bytes][64], zero behind a row's last byte.
void intarsia_lay_bytes(const uint8_t* rows, int64_t row_bytes, uint8_t* panels, int64_t outputs, int64_t bytes) {
    lay_panels(rows, row_bytes, row_bytes, outputs, bytes, panels, [](uint8_t byte) { return byte; });
}

// Rows of the weight as it was: out [count, depth].
void intarsia_unpack(const void* packed, const int64_t* rows, int64_t count, void* out, int64_t depth, int32_t kind) {
    with_weight(kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        unpack(static_cast<const uint32_t*>(packed), rows, count, static_cast<T*>(out), depth);
    });
}

// Rows of a weight in fewer bits, of the first group: out [count, depth].
void intarsia_expand(const Product* a, const int64_t* rows, int64_t count, void* out) {
    with_weight(a->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        expand(*a, rows, count, static_cast<T*>(out));
    });
}

// x: [.., width]; row_of, shares: [rows, count]; out: [rows, width]
void intarsia_combine(const void* x, const int64_t* row_of, const float* shares, void* out, int64_t rows, int64_t count,
                      int64_t width, int32_t kind) {
    with_weight(kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        combine(static_cast<const T*>(x), row_of, shares, static_cast<T*>(out), rows, count, width);
    });
}

}  // extern "C"
