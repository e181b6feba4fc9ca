// Rows of inputs meet some of a panel's codes: whole numbers of each run are scaled, and added up in float32. In vectors, or,
// where the processor has them, in matrix units: the results have the same bits.

#pragma once

#include <algorithm>
#include <type_traits>

#include "byte_tiles.h"
#include "integer_inputs.h"
#include "integers.h"

namespace {

// Some of a panel's blocks, opened, with what their groups are scaled by.
struct Part {
    const uint8_t* opened;
    int64_t first_run, runs;
    int64_t group_runs, run_in_group;  // of the first run here
    bool is_last;                      // so that a group that goes on ends nevertheless
    bool has_zero, has_least;
    const float* zero;   // [groups here][64], negative
    const float* scale;  // [groups here][64]
    const float* least;  // [groups here][64], negative
};

// Of each row the output's sum so far, and that of the group that is under way.
struct Sums {
    float* total;  // [rows][64]
    float* group;  // [rows][64]
};

// R rows, beginning with one, and V vectors of outputs, beginning with the v-th.
// ahead: what is fetched meanwhile, as much as is read, if anything is
template <int R, int V, int QUADS, bool IS_SIGNED, bool FETCHES>
void block(const Part& part, const Inputs& x, int64_t row, int v, const Sums& sums, const uint8_t* ahead) {
    const uint8_t* codes = part.opened + v * 4 * WIDTH;
    const int64_t row_bytes = x.row_bytes, all_runs = x.runs;
    const int8_t* bytes = x.bytes.data() + row * row_bytes + part.first_run * QUADS * 4;
    const int64_t first = row * all_runs + part.first_run;
    float* total = sums.total + v * WIDTH;
    float* group = sums.group + v * WIDTH;
    const bool is_wide = part.group_runs > 1;
    int64_t in_group = part.run_in_group, at = v * WIDTH;  // of the group in `scale`
    for (int64_t run = 0; run < part.runs; run++, bytes += QUADS * 4) {
        Ints sum[R][V];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) sum[r][i] = Ints{} + x.of_runs[first + r * all_runs + run].start;
        for (int quad = 0; quad < QUADS; quad++, codes += QUAD_BYTES) {
            Words code[V];
            for (int i = 0; i < V; i++) {
                code[i] = load_words(reinterpret_cast<const uint32_t*>(codes + i * 4 * WIDTH));
                if (IS_SIGNED) code[i] = (Words)((Bytes)code[i] ^ uint8_t(LESS_OF_8_BITS));
            }
            if constexpr (FETCHES) {
                for (int line = 0; line < V * 4 * WIDTH; line += LINE_BYTES) prefetch_far(ahead + line);
                ahead += V * 4 * WIDTH;
            }
            for (int r = 0; r < R; r++) {
                uint32_t word;
                std::memcpy(&word, bytes + r * row_bytes + quad * 4, 4);
                for (int i = 0; i < V; i++) sum[r][i] = add_products<IS_SIGNED>(sum[r][i], code[i], all_words(word));
            }
        }
        const bool ends = ++in_group == part.group_runs || (part.is_last && run == part.runs - 1);
        for (int r = 0; r < R; r++) {
            const int64_t here = first + r * all_runs + run;
            const Lanes scale = all_lanes(x.of_runs[here].scale);
            for (int i = 0; i < V; i++) {
                float* total_at = total + r * OUTPUTS + i * WIDTH;
                float* group_at = group + r * OUTPUTS + i * WIDTH;
                Lanes number = floats_of(sum[r][i]);
                if (part.has_zero)
                    number = add_scaled(number, load_lanes(part.zero + at + i * WIDTH), all_lanes(x.of_runs[here].sum));
                number = is_wide ? add_scaled(load_lanes(group_at), number, scale) : number * scale;
                if (!ends) {
                    store_lanes(number, group_at);
                    continue;
                }
                number = add_scaled(load_lanes(total_at), number, load_lanes(part.scale + at + i * WIDTH));
                if (part.has_least)
                    number = add_scaled(number, load_lanes(part.least + at + i * WIDTH), all_lanes(x.of_runs[here].scaled_sum));
                store_lanes(number, total_at);
                if (is_wide) store_lanes(Lanes{}, group_at);
            }
        }
        if (ends) in_group = 0, at += OUTPUTS;
    }
}

template <int R, int QUADS, bool IS_SIGNED>
void vectors_of_block(const Part& part, const Inputs& x, int64_t row, const Sums& sums, const uint8_t* ahead) {
    constexpr int V = most_vectors(R);
    for (int v = 0; v < STEP_LANES; v += V) {
        if (!ahead) {
            block<R, V, QUADS, IS_SIGNED, false>(part, x, row, v, sums, ahead);
            continue;
        }
        block<R, V, QUADS, IS_SIGNED, true>(part, x, row, v, sums, ahead);
        ahead += part.runs * QUADS * V * 4 * WIDTH;
    }
}

template <int QUADS, bool IS_SIGNED>
void rows_of_block(int rows, const Part& part, const Inputs& x, int64_t row, const Sums& sums, const uint8_t* ahead) {
    switch (rows) {
        case 1: return vectors_of_block<1, QUADS, IS_SIGNED>(part, x, row, sums, ahead);
        case 2: return vectors_of_block<2, QUADS, IS_SIGNED>(part, x, row, sums, ahead);
        case 3: return vectors_of_block<3, QUADS, IS_SIGNED>(part, x, row, sums, ahead);
        case 4: return vectors_of_block<4, QUADS, IS_SIGNED>(part, x, row, sums, ahead);
        case 5: return vectors_of_block<5, QUADS, IS_SIGNED>(part, x, row, sums, ahead);
        default: return vectors_of_block<6, QUADS, IS_SIGNED>(part, x, row, sums, ahead);
    }
}

// ahead: where memory is fetched in a line; null: it is not
void some_rows(int rows, int run_columns, bool is_wide, const Part& part, const Inputs& x, int64_t row,
               const Sums& sums, const uint8_t* ahead) {
    constexpr bool HAS_SIGNED = !HAS_FOURS;
    if (HAS_SIGNED && is_wide) {
        if (run_columns == BLOCK) return rows_of_block<8, HAS_SIGNED>(rows, part, x, row, sums, ahead);
        return rows_of_block<4, HAS_SIGNED>(rows, part, x, row, sums, ahead);
    }
    if (run_columns == BLOCK) return rows_of_block<8, false>(rows, part, x, row, sums, ahead);
    rows_of_block<4, false>(rows, part, x, row, sums, ahead);
}

constexpr int LEAST_TILE_ROWS = 12;  // fewer are as fast in vectors

// Codes of all eight bits are without signs where the processor has fours.
inline bool in_tiles(int64_t rows) { return HAS_BYTE_TILES && HAS_FOURS && rows >= LEAST_TILE_ROWS && may_use_tiles(); }

#if HAS_BYTE_TILES

constexpr int TILE_RUNS = 4;  // whose sums lie in the first cache

// Runs of a part, and what each adds to.
struct alignas(64) Runs {
    int32_t sum[TILE_RUNS][STEP_LANES][TILE][WIDTH];  // [runs][vectors of outputs][rows][outputs], from a line's beginning
    int64_t group[TILE_RUNS];                         // of the part's
    bool ends[TILE_RUNS];                             // its group
    int64_t first;                                    // of the whole row
    int count;
};

// A row's sums of some runs are scaled and added up, as `block` does it.
template <bool IS_WIDE, bool HAS_ZERO, bool HAS_LEAST>
void add_runs(const Runs& runs, const Part& part, const Inputs& x, int64_t row, int r, float* total_at, float* group_at) {
    Lanes total[STEP_LANES], group[STEP_LANES];
    for (int v = 0; v < STEP_LANES; v++) {
        total[v] = load_lanes(total_at + v * WIDTH);
        if (IS_WIDE) group[v] = load_lanes(group_at + v * WIDTH);
    }
    for (int run = 0; run < runs.count; run++) {
        const int64_t here = row * x.runs + runs.first + run, at = runs.group[run] * OUTPUTS;
        const Lanes scale = all_lanes(x.of_runs[here].scale);
        for (int v = 0; v < STEP_LANES; v++) {
            const Ints sum = (Ints)load_words(reinterpret_cast<const uint32_t*>(runs.sum[run][v][r])) + x.of_runs[here].start;
            Lanes number = floats_of(sum);
            if (HAS_ZERO) number = add_scaled(number, load_lanes(part.zero + at + v * WIDTH), all_lanes(x.of_runs[here].sum));
            number = IS_WIDE ? add_scaled(group[v], number, scale) : number * scale;
            if (IS_WIDE && !runs.ends[run]) {
                group[v] = number;
                continue;
            }
            total[v] = add_scaled(total[v], number, load_lanes(part.scale + at + v * WIDTH));
            if (HAS_LEAST)
                total[v] = add_scaled(total[v], load_lanes(part.least + at + v * WIDTH), all_lanes(x.of_runs[here].scaled_sum));
            if (IS_WIDE) group[v] = Lanes{};
        }
    }
    for (int v = 0; v < STEP_LANES; v++) {
        store_lanes(total[v], total_at + v * WIDTH);
        if (IS_WIDE) store_lanes(group[v], group_at + v * WIDTH);
    }
}

// Calls `what` with integer constants.
template <class Function>
void with_constants(Function what) {
    what();
}
template <class Function, class... More>
void with_constants(Function what, bool first, More... more) {
    if (first)
        with_constants([&](auto... others) { what(std::true_type(), others...); }, more...);
    else
        with_constants([&](auto... others) { what(std::false_type(), others...); }, more...);
}

// Up to sixteen rows, beginning with one, and all outputs. run_columns: 16 or 32
inline void rows_in_tiles(int rows, int run_columns, const Part& part, const Inputs& x, int64_t row, const Sums& sums,
                          int64_t ahead_bytes, ByteTiles& tiles) {
    Runs runs;
    const int words = run_columns / 4;
    tiles.lay_out(rows, words);
    for (int64_t from = 0; from < part.runs; from += TILE_RUNS) {
        runs.count = int(std::min<int64_t>(TILE_RUNS, part.runs - from));
        runs.first = part.first_run + from;
        const int8_t* bytes = x.bytes.data() + row * x.row_bytes + runs.first * run_columns;
        const uint8_t* codes = part.opened + from * words * QUAD_BYTES;
        // g++ does not know what the units read and write.
        asm volatile("" : : "r"(bytes), "r"(codes), "r"(&runs) : "memory");
        for (int run = 0; run < runs.count; run++, bytes += run_columns, codes += words * QUAD_BYTES) {
            const int64_t place = part.run_in_group + from + run;
            runs.group[run] = place / part.group_runs;
            runs.ends[run] = (place + 1) % part.group_runs == 0 || (part.is_last && from + run == part.runs - 1);
            const uint8_t* ahead = codes + ahead_bytes;
            tiles.multiply(bytes, x.row_bytes, codes, runs.sum[run][0][0], [&] {
                for (int i = 0; ahead_bytes && i < words; i++, ahead += 64) prefetch_far(ahead);
            });
        }
        asm volatile("" : : "r"(&runs) : "memory");
        const auto add = [&](auto is_wide, auto has_zero, auto has_least) {
            for (int r = 0; r < rows; r++)
                add_runs<is_wide(), has_zero(), has_least()>(runs, part, x, row + r, r, sums.total + r * OUTPUTS,
                                                             sums.group + r * OUTPUTS);
        };
        with_constants(add, part.group_runs > 1, part.has_zero, part.has_least);
    }
}

#endif

}  // namespace
