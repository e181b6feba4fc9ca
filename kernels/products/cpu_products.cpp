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
// thousand, whichever thread computes it, however rows are put into blocks and k is cut.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "panels.h"

namespace {

constexpr int CACHED_STEPS = 1024;      // of a panel: 256 KiB, which stay in a core's second cache for all rows
constexpr int DECODED_STEPS = 64;       // of a packed panel that few rows meet: 16 KiB, which stay in the first cache
constexpr int LINE_WORDS = 16, STEP_LINES = OUTPUTS / LINE_WORDS;  // of a cache line; lines of a step

template <class T>
constexpr int NUMBERS = 4 / sizeof(T);  // of a word

// What is fetched while a block is computed: lines of the part of the weight that comes next.
struct Ahead {
    const uint32_t* at;
    const uint32_t* end;
    int lines;  // at each step

    void fetch() {
        if (at >= end) return;
        for (int n = 0; n < lines; n++) prefetch_far(at + n * LINE_WORDS);
        at += lines * LINE_WORDS;
    }
};

// sums[r][v] over the steps of a panel, for R rows and V vectors of outputs.
template <class T, int R, int V>
inline void block(const uint32_t* const* x, int64_t from, const uint32_t* panel, int64_t steps, float* sums,
                  Ahead& ahead) {
    Lanes total[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) total[r][v] = load_lanes(sums + r * OUTPUTS + v * WIDTH);
    for (int64_t s = 0; s < steps; s++) {
        Words weight[V];
        for (int v = 0; v < V; v++) weight[v] = load_words(panel + s * OUTPUTS + v * WIDTH);
        ahead.fetch();
        for (int r = 0; r < R; r++) {
            const Words word = all_words(x[r][from + s]);
            for (int v = 0; v < V; v++) total[r][v] = add_product<T>(total[r][v], weight[v], word);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store_lanes(total[r][v], sums + r * OUTPUTS + v * WIDTH);
}

template <class T, int R>
void rows_of_block(const uint32_t* const* x, int64_t from, const uint32_t* panel, int64_t steps, float* sums,
                   Ahead& ahead) {
    constexpr int V = most_vectors(R);
    for (int v = 0; v < STEP_LANES; v += V)
        block<T, R, V>(x, from, panel + v * WIDTH, steps, sums + v * WIDTH, ahead);
}

template <class T>
void some_rows(int rows, const uint32_t* const* x, int64_t from, const uint32_t* panel, int64_t steps, float* sums,
               Ahead& ahead) {
    switch (rows) {
        case 1: return rows_of_block<T, 1>(x, from, panel, steps, sums, ahead);
        case 2: return rows_of_block<T, 2>(x, from, panel, steps, sums, ahead);
        case 3: return rows_of_block<T, 3>(x, from, panel, steps, sums, ahead);
        case 4: return rows_of_block<T, 4>(x, from, panel, steps, sums, ahead);
        case 5: return rows_of_block<T, 5>(x, from, panel, steps, sums, ahead);
        default: return rows_of_block<T, 6>(x, from, panel, steps, sums, ahead);
    }
}

struct Room {
    std::vector<uint32_t> decoded;
    std::vector<float> sums;
    std::vector<const uint32_t*> x;
};

// The outputs of one panel for rows [first, last) of a group.
template <class T>
void panel_of_rows(const Product& a, int group, int panel, int64_t first, int64_t last, Room& room) {
    const int64_t steps = (a.depth + NUMBERS<T> - 1) / NUMBERS<T>, rows = last - first;
    const int64_t panels = panels_of(a);
    const bool is_packed = a.codes.codes != nullptr;
    const uint32_t* weight = static_cast<const uint32_t*>(a.packed) + (group * panels + panel) * steps * OUTPUTS;
    room.sums.assign(rows * OUTPUTS, 0.0f);
    room.x.resize(rows);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = a.row_of ? a.row_of[first + r] : first + r;
        room.x[r] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(a.x) + row * a.x_stride);
    }
    // Blocks of nearly equal size, none of them of a row or two beside others of six.
    const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t part = is_packed && blocks == 1 ? DECODED_STEPS : CACHED_STEPS;
    if (is_packed) room.decoded.resize((part + 1) * OUTPUTS);
    for (int64_t from = 0; from < steps; from += part) {
        const int64_t here = std::min<int64_t>(part, steps - from);
        if (is_packed) {
            const int64_t pairs = (a.depth + 1) / 2, first = from * NUMBERS<T> / 2;
            const int64_t end = std::min(pairs, ((from + here) * NUMBERS<T> + 1) / 2);
            decode<T>(a.codes, pairs, group * panels + panel, first, end, room.decoded.data());
            Ahead nothing{nullptr, nullptr, 0};
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t begin = b * rows / blocks, end = (b + 1) * rows / blocks;
                some_rows<T>(int(end - begin), room.x.data() + begin, from, room.decoded.data(), here,
                             room.sums.data() + begin * OUTPUTS, nothing);
            }
            continue;
        }
        // The next part lies behind this one; of the last panel it is another weight's, which does no harm.
        const uint32_t* next = weight + (from + here) * OUTPUTS;
        const int64_t next_steps = from + here < steps ? std::min<int64_t>(CACHED_STEPS, steps - from - here)
                                                       : std::min<int64_t>(CACHED_STEPS, steps);
        Ahead ahead{next, rows > STREAMED_ROWS ? next : next + next_steps * OUTPUTS,
                    blocks < STEP_LINES ? int((STEP_LINES + blocks - 1) / blocks) : 1};
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t begin = b * rows / blocks, end = (b + 1) * rows / blocks;
            some_rows<T>(int(end - begin), room.x.data() + begin, from, weight + from * OUTPUTS, here,
                         room.sums.data() + begin * OUTPUTS, ahead);
        }
    }
    write_rows<T>(a, group, panel, first, rows, room.sums.data());
}

template <class T>
void product(const Product& a) {
    for_each_panel<Room>(a, [&](int group, int panel, int64_t first, int64_t last, Room& room) {
        panel_of_rows<T>(a, group, panel, first, last, room);
    });
}

template <class T>
void pack(const T* weight, int64_t stride, uint32_t* packed, int64_t outputs, int64_t depth) {
    constexpr int N = NUMBERS<T>;
    const int64_t steps = (depth + N - 1) / N, panels = (outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        T* to = reinterpret_cast<T*>(packed + panel * steps * OUTPUTS);
        std::memset(static_cast<void*>(to), 0, steps * OUTPUTS * 4);
        const int64_t count = std::min<int64_t>(OUTPUTS, outputs - panel * OUTPUTS);
        for (int64_t n = 0; n < count; n++) {
            const T* row = weight + (panel * OUTPUTS + n) * stride;
            for (int64_t k = 0; k < depth; k++) to[(k / N * OUTPUTS + n) * N + k % N] = row[k];
        }
    }
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
