// Rows of x in bytes: a row's inputs in a block of 32 columns are bytes from -127 to 127 times one float32.

#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "panels.h"

namespace {

constexpr int BLOCK = 32;             // columns
constexpr float NOTHING = 1e-30f;     // inputs so small, all of a block, are zero
constexpr float TO_WHOLE = 12582912;  // 1.5 * 2^23: with it added, the lowest bits are those of a whole number


// Memory that begins with a line: what lies in vectors and tiles lies in one line then, not in parts of two.
template <class T>
struct FromLine {
    typedef T value_type;

    FromLine() = default;
    template <class U>
    FromLine(const FromLine<U>&) {}

    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(LINE_BYTES))); }
    void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(LINE_BYTES)); }

    bool operator==(const FromLine&) const { return true; }
    bool operator!=(const FromLine&) const { return false; }
};

template <class T>
using Lines = std::vector<T, FromLine<T>>;

// Of a row's inputs in a run.
struct RunInputs {
    float scale, sum, scaled_sum;  // sum: of the bytes
    int32_t start;                 // of sums of products: less what is subtracted from all codes, times the sum
};

// Rows of x, rounded.
struct Inputs {
    int64_t row_bytes, runs;               // columns fill blocks. Rows are an odd number of lines apart, since those that are
                                           // a power of two apart share few places of the first cache
    Lines<int8_t> bytes;                   // [rows][row_bytes]
    std::unique_ptr<RunInputs[]> of_runs;  // [rows][runs]

    Inputs(int64_t rows, int64_t columns, int64_t runs)
        : row_bytes(((columns + LINE_BYTES - 1) / LINE_BYTES | 1) * LINE_BYTES), runs(runs), bytes(rows * row_bytes),
          of_runs(new RunInputs[rows * runs]) {}

    const int8_t* bytes_of(int64_t row, int64_t column) const { return bytes.data() + row * row_bytes + column; }
};

// Returns the scale. What is not finite makes it so.
inline float round_block(const float* x, int8_t* bytes) {
    uint32_t most = 0;
    for (int k = 0; k < BLOCK; k++) {
        uint32_t bits;
        std::memcpy(&bits, x + k, 4);
        most = std::max(most, bits & 0x7FFFFFFF);
    }
    const float largest = float_of(most), times = largest < NOTHING ? 0 : 127.0f / largest;
    float shifted[BLOCK];
    for (int k = 0; k < BLOCK; k += WIDTH)
        store_lanes(rounded(load_lanes(x + k) * all_lanes(times)) + all_lanes(TO_WHOLE), shifted + k);
    for (int k = 0; k < BLOCK; k++) {
        uint32_t bits;
        std::memcpy(&bits, shifted + k, 4);
        bytes[k] = int8_t(bits);
    }
    return largest < NOTHING ? 0 : largest / 127.0f;
}

template <class T>
void round_row(const T* x, const int64_t* order, int64_t depth, int run_columns, int less, Inputs& to, int64_t row) {
    int8_t* bytes = to.bytes.data() + row * to.row_bytes;
    int64_t at = row * to.runs;
    for (int64_t k = 0; k < depth; k += BLOCK) {
        float numbers[BLOCK] = {};
        const int here = int(std::min<int64_t>(BLOCK, depth - k));
        if (order)
            for (int i = 0; i < here; i++) numbers[i] = to_float(x[order[k + i]]);
        else if (here == BLOCK)
            for (int i = 0; i < BLOCK; i += LANES) store(load(x + k + i), numbers + i);
        else
            for (int i = 0; i < here; i++) numbers[i] = to_float(x[k + i]);
        const float scale = round_block(numbers, bytes + k);
        for (int from = 0; from < BLOCK; from += run_columns, at++) {
            int32_t sum = 0;
            for (int i = 0; i < run_columns; i++) sum += bytes[k + from + i];
            to.of_runs[at] = {scale, float(sum), float(sum) * scale, -less * sum};
        }
    }
}

template <class T>
void round_rows(const Product& a, int run_columns, int less, Inputs& to) {
#pragma omp parallel for schedule(static) if (a.rows * a.depth > (1 << 14))
    for (int64_t r = 0; r < a.rows; r++) {
        const int64_t row = a.row_of ? a.row_of[r] : r;
        round_row(static_cast<const T*>(a.x) + row * a.x_stride, a.order, a.depth, run_columns, less, to, r);
    }
}

}  // namespace
