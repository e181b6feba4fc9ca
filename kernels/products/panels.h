// What products of all weights share: work is a panel of 64 outputs and some rows, which a thread takes at a time.

#pragma once

#include <omp.h>

#include <algorithm>
#include <cstring>
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
constexpr int STEP_LANES = OUTPUTS / WIDTH;  // vectors of a step
constexpr int SHARE_ROWS = 192;         // of x that a thread takes at a time
constexpr int64_t STREAMED_ROWS = 96;   // up to so many, memory is waited for, and the next panel is fetched meanwhile
constexpr int64_t MANY_PANELS = 256, RUN_PANELS = 16;  // of so many, a thread takes so many at a time

inline int64_t panels_of(const Product& a) { return (a.outputs + OUTPUTS - 1) / OUTPUTS; }

// How many rows and vectors a block has, so that its sums fit the registers.
constexpr int MOST_ROWS = 6;
constexpr int most_vectors(int rows) {
    const int room = REGISTERS - REGISTERS / 4;
    int vectors = STEP_LANES;
    while (rows * vectors > room) vectors /= 2;
    return vectors;
}

// Rows [first, first + rows) of a panel's outputs, of their sums [rows][64].
template <class T, class Out>
void write_rows_as(const Product& a, int group, int panel, int64_t first, int64_t rows, float* sums) {
    const int count = std::min(OUTPUTS, a.outputs - panel * OUTPUTS);
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + int64_t(group) * a.outputs + panel * OUTPUTS : nullptr;
    for (int64_t r = 0; r < rows; r++, sums += OUTPUTS) {
        Out* out = static_cast<Out*>(a.out) + (first + r) * a.outputs + panel * OUTPUTS;
        if (bias)
            for (int n = 0; n < count; n++) sums[n] += to_float(bias[n]);
        int n = 0;
        for (; n + LANES <= count; n += LANES) store(load(sums + n), out + n);
        for (; n < count; n++) from_float(sums[n], out + n);
    }
}

template <class T>
void write_rows(const Product& a, int group, int panel, int64_t first, int64_t rows, float* sums) {
    if (a.out_kind)
        write_rows_as<T, T>(a, group, panel, first, rows, sums);
    else
        write_rows_as<T, float>(a, group, panel, first, rows, sums);
}

// Calls panel_of_rows(group, panel, first row, last row, room) for all there are; each thread has a `Room` of its own.
template <class Room, class Function>
void for_each_panel(const Product& a, Function panel_of_rows) {
    const int64_t panels = panels_of(a);
    // Work is a panel and a share of the rows of its group, in the order in which panels lie in memory.
    struct Work {
        int group;
        int64_t first, last;
    };
    std::vector<Work> shares;
    for (int g = 0; g < a.groups; g++) {
        const int64_t first = a.first_row ? a.first_row[g] : 0;
        const int64_t rows = (a.first_row ? a.first_row[g + 1] : a.rows) - first;
        const int64_t count = (rows + SHARE_ROWS - 1) / SHARE_ROWS;
        for (int64_t c = 0; c < count; c++) shares.push_back({g, first + c * rows / count, first + (c + 1) * rows / count});
    }
    const int64_t work = int64_t(shares.size()) * panels;
    // A thread reads panels in a line where memory is waited for. Else a thread that is free takes the next.
    const int64_t threads = omp_get_max_threads(), even = (work + threads - 1) / threads;
    const int64_t run = a.rows > STREAMED_ROWS * a.groups ? 1 : work >= MANY_PANELS ? RUN_PANELS : even;
#pragma omp parallel
    {
        Room room;
#pragma omp for schedule(dynamic, 1)
        for (int64_t begin = 0; begin < work; begin += run) {
            const int64_t end = std::min(begin + run, work);
            for (int64_t n = begin; n < end; n++) {
                const Work& share = shares[n / panels];
                panel_of_rows(share.group, int(n % panels), share.first, share.last, room);
            }
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
