// Products of tokens with weights in fewer bits, in whole numbers: inputs are rounded to bytes, too. Plain C ABI; see
// products/integers.py, and reference.py for the arithmetic.
//
//     block   32 columns: a row's inputs there are bytes from -127 to 127 times one float32, the largest divided by 127
//     run     16 or 32 columns, of one block and one group: products of bytes are summed as whole numbers, exactly
//     group   columns that share a weight's scale: its runs are summed in float32, then scaled, and added to the output
//
// The lanes of a vector are outputs. Each float32 sum runs from the first column to the last, in one order: for one row
// as for a thousand, whichever thread computes it, however rows are put into blocks and columns are cut. Whole numbers may be
// summed in any order, so many rows meet codes in matrix units where the processor has them.

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "integer_rows.h"

namespace {

constexpr int BLOCK_BYTES = BLOCK / 4 * QUAD_BYTES;  // opened
constexpr int OPENED_BLOCKS = 8;                     // of a panel: 16 KiB, which stay in the first cache

// -- a weight ----------------------------------------------------------------------------------------------------------

// Calls `what` with an integer constant: the kind of codes, which is none of eight bits.
template <class Function>
void with_code_kind(int kind, Function what) {
    switch (kind) {
        case INT4: return what(std::integral_constant<int, INT4>());
        case E2M1: return what(std::integral_constant<int, E2M1>());
        case INT5: return what(std::integral_constant<int, INT5>());
        case INT6: return what(std::integral_constant<int, INT6>());
        case INT2: return what(std::integral_constant<int, INT2>());
        case INT3: return what(std::integral_constant<int, INT3>());
        default: return what(std::integral_constant<int, IQ4>());
    }
}

// With which numbers of that kind have no signs.
constexpr int added_to_all(int kind) { return kind == INT8 || kind == IQ4 ? 128 : kind == E2M1 ? E2M1_LESS : 0; }

// What one weight's panels have in common.
struct Weight {
    const Codes& codes;
    int64_t blocks;   // of a panel, the last one filled up
    int run_columns;  // 16 where groups have no more, or begin there
    int64_t runs;     // of a panel, those that only fill it up left out
    bool is_of_8_bits;  // in memory
    int most;           // of the codes, once they are opened
    int less;           // what is subtracted from all codes, once they are opened

    explicit Weight(const Product& a)
        : codes(a.codes), blocks((a.depth + BLOCK - 1) / BLOCK),
          run_columns(a.codes.columns % BLOCK || a.codes.offset % BLOCK ? BLOCK / 2 : BLOCK),
          runs((a.depth + run_columns - 1) / run_columns),
          is_of_8_bits(low_bits(a.codes.code_kind) == 8), most(most_of(a.codes.code_kind)),
          less(int(a.codes.middle) + added_to_all(a.codes.code_kind)) {}

    int runs_of_block() const { return BLOCK / run_columns; }
    // As they are multiplied.
    int subtracted() const { return less - (most == OF_8_BITS ? LESS_OF_8_BITS : 0); }
};

// Where a thread opens codes, and keeps sums.
struct Room {
    Lines<uint8_t> opened;
    Lines<float> zero, scale, least, sums;
    ByteTiles tiles;

    // Blocks [from, to) of a panel.
    Part part(const Weight& weight, int64_t panel, int64_t from, int64_t to) {
        const Codes& a = weight.codes;
        const int64_t first_run = from * weight.runs_of_block();
        const int64_t runs = std::min(weight.runs, to * weight.runs_of_block()) - first_run;
        const int64_t group_runs = a.columns / weight.run_columns, place = first_run + a.offset / weight.run_columns;
        const int64_t first = place / group_runs, groups = (place + runs - 1) / group_runs + 1 - first;
        load_scales_of_groups(a, panel, first, groups);
        return {first_run, runs, group_runs, place % group_runs, to == weight.blocks,
                a.zero != nullptr, a.least != nullptr, zero.data(), scale.data(), least.data()};
    }

    // Codes of eight bits lie as if they were opened.
    const uint8_t* open(const Weight& weight, int64_t panel, int64_t from, int64_t to) {
        if (weight.is_of_8_bits) return weight.codes.codes + (panel * weight.blocks + from) * BLOCK_BYTES;
        opened.resize((to - from) * BLOCK_BYTES);
        with_code_kind(weight.codes.code_kind, [&](auto kind) {
            open_blocks<kind()>(weight.codes, weight.blocks, panel, from, to, opened.data());
        });
        return opened.data();
    }

    void load_scales_of_groups(const Codes& a, int64_t panel, int64_t first, int64_t groups) {
        for (auto* each : {&zero, &scale, &least}) each->resize(groups * OUTPUTS);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = g * OUTPUTS;
            load_group(a, a.scale, a.scale_kind, a.block_scale, panel, first + g, scale.data() + at);
            if (a.least) {
                load_group(a, a.least, a.least_kind, a.block_least, panel, first + g, least.data() + at);
                for (int n = 0; n < OUTPUTS; n++) least[at + n] = -least[at + n];
            }
            if (a.zero) {
                const uint8_t* zeros = a.zero + (panel * a.groups + first + g) * OUTPUTS;
                for (int n = 0; n < OUTPUTS; n++) zero[at + n] = -float(zeros[n]);
            }
        }
    }
};

// Scales of a whole row, and the half that codes of e2m1 are too large.
void scale_rows(const Weight& weight, int64_t panel, int64_t rows, float* sums) {
    const Codes& a = weight.codes;
    const float* factor = a.factor ? a.factor + panel * OUTPUTS : nullptr;
    for (int64_t r = 0; r < rows; r++, sums += OUTPUTS)
        for (int n = 0; n < OUTPUTS; n++) {
            if (a.code_kind == E2M1) sums[n] *= 0.5f;
            if (factor) sums[n] = a.divides ? sums[n] / factor[n] : sums[n] * factor[n];
        }
}

// Blocks [from, to) of a panel meet one row, which opens them on the way.
void meet_one_row(const Weight& weight, int64_t panel, int64_t from, const Part& part, const Inputs& x, int64_t row,
                  const Sums& sums) {
    with_code_kind(weight.codes.code_kind, [&](auto kind) {
        BlockOfCodes<kind()> codes(weight.codes, weight.blocks, panel, from);
        add_rows(part, x, row, 1, sums, [&](Runs& runs) {
            const int8_t* bytes = x.bytes_of(row, runs.first * weight.run_columns);
            if (weight.run_columns == BLOCK)
                sum_one_row<kind(), BLOCK_QUADS>(codes, bytes, runs);
            else
                sum_one_row<kind(), BLOCK_QUADS / 2>(codes, bytes, runs);
        });
    });
}

// They meet some rows. opened: their codes; is_read: from memory; tiles: or null, where vectors multiply
void meet_rows(const Weight& weight, const uint8_t* opened, bool is_read, const Part& part, const Inputs& x, int64_t row,
               int rows, const Sums& sums, ByteTiles* tiles) {
    const int run_bytes = weight.run_columns / 4 * QUAD_BYTES;
    add_rows(part, x, row, rows, sums, [&](Runs& runs) {
        const uint8_t* codes = opened + (runs.first - part.first_run) * run_bytes;
        const Meeting here{codes, x.bytes_of(row, runs.first * weight.run_columns), x.row_bytes, is_read};
#if HAS_BYTE_TILES
        if (tiles) return sum_in_tiles(rows, weight.run_columns, here, runs, *tiles);
#endif
        sum_in_vectors(rows, weight.run_columns, weight.most, here, runs);
    });
}

template <class T>
void do_work(const Product& a, const Weight& weight, const Inputs& x, const Work& work, Room& room) {
    const int64_t first = work.first, rows = work.last - first, at = work.group * panels_of(a) + work.panel;
    room.sums.assign(2 * rows * OUTPUTS, 0.0f);
    const Sums all{room.sums.data(), room.sums.data() + rows * OUTPUTS};
    const bool is_in_tiles = in_tiles(rows);
    const int most = is_in_tiles ? MOST_TOGETHER : MOST_ROWS;
    const int64_t blocks = (rows + most - 1) / most;  // of rows, of nearly equal size
    for (int64_t from = 0; from < weight.blocks; from += OPENED_BLOCKS) {
        const int64_t to = std::min(weight.blocks, from + OPENED_BLOCKS);
        const Part part = room.part(weight, at, from, to);
        if (rows == 1 && !weight.is_of_8_bits) {
            meet_one_row(weight, at, from, part, x, first, all);
            continue;
        }
        const uint8_t* opened = room.open(weight, at, from, to);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t begin = b * rows / blocks;
            const int here = int((b + 1) * rows / blocks - begin);
            // From memory, where what comes next is fetched meanwhile. What is read once and in a line, the processor
            // fetches by itself.
            const bool is_in_a_line = !is_in_tiles && blocks == 1 && most_vectors(here) == STEP_LANES;
            const bool is_read = weight.is_of_8_bits && b == 0 && !is_in_a_line;
            const Sums sums{all.total + begin * OUTPUTS, all.group + begin * OUTPUTS};
            meet_rows(weight, opened, is_read, part, x, first + begin, here, sums, is_in_tiles ? &room.tiles : nullptr);
        }
    }
    if (weight.codes.code_kind == E2M1 || weight.codes.factor) scale_rows(weight, at, rows, all.total);
    write_rows<T>(a, work, first, rows, all.total);
}

template <class T>
void product(const Product& a) {
    const Weight weight(a);
    Inputs x(a.rows, weight.blocks * BLOCK, weight.blocks * weight.runs_of_block());
    round_rows<T>(a, weight.run_columns, weight.subtracted(), x);
    for_each_work<Room>(a, 1, [&](const Work& work, const Work*, Room& room) { do_work<T>(a, weight, x, work, room); });
}

// -- the weight as numbers ---------------------------------------------------------------------------------------------

// Columns of a part of the panel's n-th row, as `Codes.numbers` computes them: out [count]. groups: of each 16 columns,
// which of the part's groups they are of.
template <class T>
void write_numbers(const Weight& weight, const Part& part, const uint8_t* opened, const int* groups, const float* factor,
                   int n, T* out, int64_t count) {
    typedef uint8_t Few __attribute__((vector_size(LANES)));
    typedef int32_t Quads __attribute__((vector_size(LANES)));
    typedef int32_t Wide __attribute__((vector_size(4 * LANES)));
    opened += n * 4;
    const float half = weight.codes.code_kind == E2M1 ? 0.5f : 1.0f;
    for (int64_t from = 0; from < count; from += LANES, groups++, opened += LANES / 4 * QUAD_BYTES) {
        int32_t quad[LANES / 4];
        for (int i = 0; i < LANES / 4; i++) std::memcpy(quad + i, opened + i * QUAD_BYTES, 4);
        const Few bytes = (Few)Quads{quad[0], quad[1], quad[2], quad[3]};
        const int64_t at = *groups * OUTPUTS + n;
        const float zero = float(weight.less) - (part.has_zero ? part.zero[at] : 0);
        float scale = part.scale[at];
        if (factor) scale = weight.codes.divides ? scale / factor[n] : scale * factor[n];
        const Half halfwords = __builtin_convertvector(bytes, Half);  // g++ does these steps by vectors, not all at once
        Vec numbers = __builtin_convertvector(__builtin_convertvector(halfwords, Wide), Vec);
        numbers = (numbers - zero) * half * scale;
        if (part.has_least) {
            float each[LANES];
            store(numbers, each);
            for (int i = 0; i < LANES; i += WIDTH)
                store_lanes(rounded(load_lanes(each + i)) + all_lanes(part.least[at]), each + i);
            numbers = load(each);
        }
        if (count - from >= LANES) {
            store(numbers, out + from);
            continue;
        }
        for (int k = 0; k < count - from; k++) from_float(numbers[k], out + from + k);
    }
}

// Rows of one panel: out [count, depth].
template <class T>
void write_rows_of_panel(const Product& a, const Weight& weight, const int64_t* rows, int64_t count, T* out, Room& room) {
    const int64_t panel = *rows / OUTPUTS;
    const float* factor = a.codes.factor ? a.codes.factor + panel * OUTPUTS : nullptr;
    int groups[OPENED_BLOCKS * BLOCK / LANES];
    for (int64_t from = 0; from < weight.blocks; from += OPENED_BLOCKS) {
        const int64_t to = std::min(weight.blocks, from + OPENED_BLOCKS);
        const Part part = room.part(weight, panel, from, to);
        const uint8_t* opened = room.open(weight, panel, from, to);
        const int64_t first = from * BLOCK, columns = std::min<int64_t>(OPENED_BLOCKS * BLOCK, a.depth - first);
        for (int64_t k = 0; k < columns; k += LANES)
            groups[k / LANES] = int((part.run_in_group + k / weight.run_columns) / part.group_runs);
        for (int64_t r = 0; r < count; r++)
            write_numbers(weight, part, opened, groups, factor, int(rows[r] % OUTPUTS), out + r * a.depth + first, columns);
    }
}

// Rows of the first group of weights: out [count, depth]. Neighbours of one panel are opened once.
template <class T>
void write_weight_rows(const Product& a, const int64_t* rows, int64_t count, T* out) {
    const Weight weight(a);
#pragma omp parallel if (count > 1)
    {
        Room room;
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < count; first += OUTPUTS)
            for (int64_t begin = first, end; begin < std::min(count, first + OUTPUTS); begin = end) {
                end = begin + 1;
                while (end < std::min(count, first + OUTPUTS) && rows[end] / OUTPUTS == rows[begin] / OUTPUTS) end++;
                write_rows_of_panel(a, weight, rows + begin, end - begin, out + begin * a.depth, room);
            }
    }
}

}  // namespace

extern "C" {

const char* intarsia_integers() { return INTEGERS_NAME; }

void intarsia_integer_product(const Product* a) {
    with_weight(a->kind, [&](auto* number) { product<std::remove_pointer_t<decltype(number)>>(*a); });
}

// Rows of the weight as it was, of the first group: out [count, depth].
void intarsia_integer_rows(const Product* a, const int64_t* rows, int64_t count, void* out) {
    with_weight(a->kind, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        write_weight_rows(*a, rows, count, static_cast<T*>(out));
    });
}

// Codes of `bits` bits from rows [outputs][row_bytes] into panels [panels][words][64], or back.
void intarsia_lay(uint8_t* rows, int64_t row_bytes, uint32_t* panels, int64_t outputs, int64_t words, int32_t bits,
                  uint32_t flipped, int32_t is_back) {
    switch (2 * bits + is_back) {
        case 2: return lay<1>(rows, row_bytes, panels, outputs, words, flipped);
        case 3: return lay_back<1>(rows, row_bytes, panels, outputs, words, flipped);
        case 4: return lay<2>(rows, row_bytes, panels, outputs, words, flipped);
        case 5: return lay_back<2>(rows, row_bytes, panels, outputs, words, flipped);
        case 8: return lay<4>(rows, row_bytes, panels, outputs, words, flipped);
        case 9: return lay_back<4>(rows, row_bytes, panels, outputs, words, flipped);
        case 16: return lay<8>(rows, row_bytes, panels, outputs, words, flipped);
        default: return lay_back<8>(rows, row_bytes, panels, outputs, words, flipped);
    }
}

}  // extern "C"
