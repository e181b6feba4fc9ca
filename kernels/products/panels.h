// What products of all weights share: work is a panel of 64 outputs and some rows, which a thread takes at a time.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "decode.h"
#include "numbers.h"
#include "vectors.h"

namespace {

struct Product {
    const void* x;             // [rows of x, depth], the numbers of a row side by side
    const void* packed;        // [groups][panels][steps][64] words
    const void* bias;          // [groups][outputs], or null
    void* out;                 // [rows][outputs]
    const int64_t* first_row;  // [groups + 1]: the rows of each group of weights; null: all are of one
    const int64_t* row_of;     // [rows]: which row of x; null: the same
    const int64_t* order;      // [depth]: which number of x's row meets each column, in integer products; null: the same
    int64_t rows, x_stride;    // x_stride: between rows, in numbers
    int32_t groups, outputs, depth, kind;  // kind of numbers: 0 float32, 1 bfloat16
    int32_t out_kind;                      // of results: the same, or float32
    Codes codes;               // in place of `packed`, of all groups one after the other
};

constexpr int OUTPUTS = 64;             // of a panel
constexpr int64_t LINE_BYTES = 64;      // of the caches
constexpr int STEP_LANES = OUTPUTS / WIDTH;  // vectors of a step
constexpr int64_t SHARE_BYTES = 768 << 10;  // of x that a thread takes at a time: they and a panel stay in its second cache
constexpr int64_t LEAST_SHARE_ROWS = 192, MOST_SHARE_ROWS = 512;
constexpr int64_t STREAMED_ROWS = 160;  // up to so many, memory is waited for, and the next panel is fetched meanwhile

inline int64_t panels_of(const Product& a) { return (a.outputs + OUTPUTS - 1) / OUTPUTS; }

// How many rows and vectors a block has, so that registers hold its sums, the fewer of both, a word and a mask.
constexpr int MOST_ROWS = 6;
constexpr int most_vectors(int rows) {
    int vectors = STEP_LANES;
    while (rows * vectors + std::min(rows, vectors) + 2 > REGISTERS) vectors /= 2;
    return vectors;
}

// What a thread does at a time: outputs [from, to) of a panel, for rows [first, last) of its group.
struct Work {
    int group, panel;
    int64_t first, last;
    int from, to;

    int outputs() const { return to - from; }
};

// Some rows of a panel's outputs, of their sums [rows][64]. first: of all rows
template <class T, class Out>
void write_rows_as(const Product& a, const Work& work, int64_t first, int64_t rows, float* sums) {
    const int end = std::min(work.to, a.outputs - work.panel * OUTPUTS);
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + int64_t(work.group) * a.outputs + work.panel * OUTPUTS : nullptr;
    for (int64_t r = 0; r < rows; r++, sums += OUTPUTS) {
        Out* out = static_cast<Out*>(a.out) + (first + r) * a.outputs + work.panel * OUTPUTS;
        if (bias)
            for (int n = work.from; n < end; n++) sums[n] += to_float(bias[n]);
        int n = work.from;
        for (; n + LANES <= end; n += LANES) store(load(sums + n), out + n);
        for (; n < end; n++) from_float(sums[n], out + n);
    }
}

template <class T>
void write_rows(const Product& a, const Work& work, int64_t first, int64_t rows, float* sums) {
    if (a.out_kind)
        write_rows_as<T, T>(a, work, first, rows, sums);
    else
        write_rows_as<T, float>(a, work, first, rows, sums);
}

// All there is to do: panels, in the order in which they lie in memory, and some rows of their group with each.
class AllWork {
  public:
    explicit AllWork(const Product& a) : panels_(panels_of(a)) {
        const int64_t row_bytes = a.depth * (a.kind ? 2 : 4);
        const int64_t most = std::clamp(SHARE_BYTES / row_bytes, LEAST_SHARE_ROWS, MOST_SHARE_ROWS);
        for (int g = 0; g < a.groups; g++) {
            const int64_t begin = a.first_row ? a.first_row[g] : 0;
            const int64_t rows = (a.first_row ? a.first_row[g + 1] : a.rows) - begin;
            const int64_t parts = (rows + most - 1) / most;
            for (int64_t p = 0; p < parts; p++) rows_.push_back({g, begin + p * rows / parts, begin + (p + 1) * rows / parts});
        }
    }

    int64_t count() const { return int64_t(rows_.size()) * panels_; }

    Work at(int64_t n, int from = 0, int to = OUTPUTS) const {
        const Rows& rows = rows_[n / panels_];
        return {rows.group, int(n % panels_), rows.first, rows.last, from, to};
    }

  private:
    struct Rows {
        int group;
        int64_t first, last;
    };
    const int64_t panels_;
    std::vector<Rows> rows_;
};

// What is left of a thread's share: pieces [first, last). The thread takes them from the front, so that it reads memory in a
// line; one that has done its own takes them from the back, since a neighbour may slow a core down.
class alignas(LINE_BYTES) Share {
  public:
    struct Pieces {
        uint32_t first, last;

        int64_t count() const { return int64_t(last) - first; }
    };

    void give(Pieces pieces) { left_.store(pieces, std::memory_order_relaxed); }
    Pieces left() const { return left_.load(std::memory_order_relaxed); }

    // Those of one panel, which has so many; none: there are no more.
    Pieces take_first(uint32_t of_panel) {
        Pieces all = left(), taken;
        do {
            if (all.count() <= 0) return {};
            taken = {all.first, std::min(all.last, (all.first / of_panel + 1) * of_panel)};
        } while (!left_.compare_exchange_weak(all, {taken.last, all.last}, std::memory_order_relaxed));
        return taken;
    }
    Pieces take_last(uint32_t of_panel) {
        Pieces all = left(), taken;
        do {
            if (all.count() <= 0) return {};
            taken = {std::max(all.first, (all.last - 1) / of_panel * of_panel), all.last};
        } while (!left_.compare_exchange_weak(all, {all.first, taken.first}, std::memory_order_relaxed));
        return taken;
    }

  private:
    std::atomic<Pieces> left_{};
};

// Calls do_work(work, next, room) for all there is, next: what the same thread probably does after it, or null. Each thread
// has a `Room` of its own. parts: that a panel may be done in, 1 or 2
template <class Room, class Function>
void for_each_work(const Product& a, int parts, Function do_work) {
    const AllWork all(a);
    if (a.rows > STREAMED_ROWS * a.groups) {  // inputs and panels stay in the caches
#pragma omp parallel
        {
            Room room;
#pragma omp for schedule(dynamic, 1)
            for (int64_t n = 0; n < all.count(); n++) do_work(all.at(n), nullptr, room);
        }
        return;
    }
    const int64_t pieces = parts * all.count(), threads = omp_get_max_threads();
    const std::unique_ptr<Share[]> shares(new Share[threads]);
    for (int64_t t = 0; t < threads; t++)
        shares[t].give({uint32_t(pieces * t / threads), uint32_t(pieces * (t + 1) / threads)});
#pragma omp parallel
    {
        Room room;
        const auto do_pieces = [&](Share::Pieces taken, const Work* next) {
            const int begin = int(taken.first % parts), outputs = OUTPUTS / parts;
            do_work(all.at(taken.first / parts, begin * outputs, int(begin + taken.count()) * outputs), next, room);
        };
        // Its own share, in a line.
        const int own = omp_get_thread_num();
        for (;;) {
            const Share::Pieces taken = shares[own].take_first(parts), rest = shares[own].left();
            if (!taken.count()) break;
            const Work next = all.at(std::min(int64_t(rest.first) / parts, all.count() - 1));
            do_pieces(taken, rest.count() >= parts ? &next : nullptr);
        }
        // Then what others have left of theirs.
        for (int64_t t = 1; t < threads; t++)
            for (;;) {
                const Share::Pieces taken = shares[(own + t) % threads].take_last(parts);
                if (!taken.count()) break;
                do_pieces(taken, nullptr);
            }
    }
}

// Rows of up to 64 outputs, each from first to last, become words of 64 outputs side by side: to [words][64]. By runs of two
// lines, so that what is read and what is written stay in the first cache; the row's next run is fetched meanwhile.
// rows: `row_bytes` apart; change: what a word becomes
template <class Word, class Function>
void lay_side_by_side(const void* rows, int64_t row_bytes, int64_t count, int64_t words, Word* to, Function change) {
    constexpr int RUN_BYTES = 2 * LINE_BYTES, RUN = RUN_BYTES / sizeof(Word);
    for (int64_t first = 0; first < words; first += RUN)
        for (int64_t n = 0; n < count; n++) {
            const char* at = static_cast<const char*>(rows) + n * row_bytes + first * sizeof(Word);
            for (int line = 0; line < RUN_BYTES; line += LINE_BYTES) prefetch_far(at + RUN_BYTES + line);
            Word run[RUN];
            const int here = int(std::min<int64_t>(RUN, words - first));
            std::memcpy(run, at, here * sizeof(Word));
            for (int w = 0; w < here; w++) to[(first + w) * OUTPUTS + n] = change(run[w]);
        }
}

// The same of all outputs, in panels [panels][words][64]. rows: [outputs][row_bytes], `stride_bytes` apart; what is behind
// their last byte is zero, within a word before it is changed
template <class Word, class Function>
void lay_panels(const void* rows, int64_t stride_bytes, int64_t row_bytes, int64_t outputs, int64_t words, Word* panels,
                Function change) {
    const int64_t whole = row_bytes / sizeof(Word), rest = row_bytes % sizeof(Word);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < (outputs + OUTPUTS - 1) / OUTPUTS; panel++) {
        const char* from = static_cast<const char*>(rows) + panel * OUTPUTS * stride_bytes;
        Word* to = panels + panel * words * OUTPUTS;
        const int64_t count = std::min<int64_t>(OUTPUTS, outputs - panel * OUTPUTS);
        if (count < OUTPUTS || whole < words) std::memset(to, 0, words * OUTPUTS * sizeof(Word));
        lay_side_by_side(from, stride_bytes, count, whole, to, change);
        for (int64_t n = 0; rest && n < count; n++) {
            Word last = 0;
            std::memcpy(&last, from + n * stride_bytes + whole * sizeof(Word), rest);
            to[whole * OUTPUTS + n] = change(last);
        }
    }
}

// Weights are float32 or bfloat16.
template <class Function>
void with_weight(int kind, Function what) {
    if (kind)
        what(static_cast<bfloat16*>(nullptr));
    else
        what(static_cast<float*>(nullptr));
}

}  // namespace
