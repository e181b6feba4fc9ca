// Rows of inputs meet some of a panel's codes: whole numbers of each run are scaled, and added up in float32. Whole numbers
// are summed in one of three ways, whose results are the same: of one row, of a few in vectors, or, where the processor has
// them, in matrix units.

#pragma once

#include <algorithm>
#include <type_traits>

#include "byte_tiles.h"
#include "integer_inputs.h"
#include "integers.h"

namespace {

// Some of a panel's blocks, with what their groups are scaled by.
struct Part {
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

constexpr int MOST_TOGETHER = 16;  // rows: of a tile
constexpr int AHEAD_BYTES = 4096, FAR_AHEAD_BYTES = 16384;  // what is fetched while codes of eight bits meet rows: in
                                                            // matrix units, in vectors

// Runs of a part that are summed before they are scaled, and what each adds to. Their sums lie in the first cache.
struct alignas(64) Runs {
    static constexpr int MOST = 4;

    int32_t sum[MOST][STEP_LANES][MOST_TOGETHER][WIDTH];  // [runs][vectors of outputs][rows][outputs]
    int64_t group_at[MOST];                               // where its scales begin, of the part's
    bool ends[MOST];                                      // its group
    int64_t first;                                        // of the whole row
    int count = 0;

    explicit Runs(const Part& part) : first(part.first_run), part_(part), in_group_(part.run_in_group) {}

    Ints sum_of(int run, int v, int r) const { return (Ints)load_words(reinterpret_cast<const uint32_t*>(sum[run][v][r])); }
    void put(int run, int v, int r, Ints sums) { std::memcpy(sum[run][v][r], &sums, sizeof sums); }

    // Whether there are any more.
    bool go_on() {
        first += count, done_ += count;
        count = int(std::min<int64_t>(MOST, part_.runs - done_));
        for (int run = 0; run < count; run++) {
            group_at[run] = at_;
            ends[run] = ++in_group_ == part_.group_runs || (part_.is_last && done_ + run == part_.runs - 1);
            if (ends[run]) in_group_ = 0, at_ += OUTPUTS;
        }
        return count > 0;
    }

  private:
    const Part& part_;
    int64_t in_group_, at_ = 0, done_ = 0;
};

// -- scaling -----------------------------------------------------------------------------------------------------------

constexpr int SCALED_VECTORS = 4;  // at once: registers hold what they add up to

// The r-th row's sums of some runs are scaled and added up.
template <bool IS_WIDE, bool HAS_ZERO, bool HAS_LEAST>
void add_row(const Runs& runs, const Part& part, const RunInputs* of_runs, int r, float* total_at, float* group_at) {
    constexpr int V = SCALED_VECTORS;
    static_assert(STEP_LANES % V == 0);
    for (int first = 0; first < STEP_LANES; first += V, total_at += V * WIDTH, group_at += V * WIDTH) {
        Lanes total[V], group[V];
        for (int v = 0; v < V; v++) {
            total[v] = load_lanes(total_at + v * WIDTH);
            if (IS_WIDE) group[v] = load_lanes(group_at + v * WIDTH);
        }
        for (int run = 0; run < runs.count; run++) {
            const RunInputs& inputs = of_runs[run];
            const Lanes scale = all_lanes(inputs.scale);
            for (int v = 0; v < V; v++) {
                const int64_t at = runs.group_at[run] + (first + v) * WIDTH;
                Lanes number = floats_of(runs.sum_of(run, first + v, r) + inputs.start);
                if (HAS_ZERO) number = add_scaled(number, load_lanes(part.zero + at), all_lanes(inputs.sum));
                number = IS_WIDE ? add_scaled(group[v], number, scale) : number * scale;
                if (IS_WIDE && !runs.ends[run]) {
                    group[v] = number;
                    continue;
                }
                total[v] = add_scaled(total[v], number, load_lanes(part.scale + at));
                if (HAS_LEAST) total[v] = add_scaled(total[v], load_lanes(part.least + at), all_lanes(inputs.scaled_sum));
                if (IS_WIDE) group[v] = Lanes{};
            }
        }
        for (int v = 0; v < V; v++) {
            store_lanes(total[v], total_at + v * WIDTH);
            if (IS_WIDE) store_lanes(group[v], group_at + v * WIDTH);
        }
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

// Rows beginning with one. sum_runs(runs): sums whole numbers of the runs that are next
template <class Function>
void add_rows(const Part& part, const Inputs& x, int64_t row, int rows, const Sums& sums, Function sum_runs) {
    Runs runs(part);
    while (runs.go_on()) {
        sum_runs(runs);
        const auto add = [&](auto is_wide, auto has_zero, auto has_least) {
            for (int r = 0; r < rows; r++)
                add_row<is_wide(), has_zero(), has_least()>(runs, part, &x.of_runs[(row + r) * x.runs + runs.first], r,
                                                            sums.total + r * OUTPUTS, sums.group + r * OUTPUTS);
        };
        with_constants(add, part.group_runs > 1, part.has_zero, part.has_least);
    }
}

// -- one row -----------------------------------------------------------------------------------------------------------

inline Words words_at(const int8_t* bytes) {
    uint32_t word;
    std::memcpy(&word, bytes, 4);
    return all_words(word);
}

// Codes of all eight bits as they are multiplied.
inline Words less_half(Words codes) { return (Words)((Bytes)codes ^ uint8_t(LESS_OF_8_BITS)); }

// Codes are opened on their way, and lie nowhere in between. codes: of the first block of the runs, and then of the next
template <int KIND, int QUADS>
void sum_one_row(BlockOfCodes<KIND>& codes, const int8_t* bytes, Runs& runs) {
    constexpr int HERE = BLOCK_QUADS / QUADS;  // runs of a block
    static_assert(Runs::MOST % HERE == 0);
    for (int run = 0; run < runs.count; run += HERE, codes.go_on(), bytes += BLOCK_QUADS * 4) {
        codes.fetch_what_comes();
        Words words[HERE][QUADS];
        for (int n = 0; n < HERE; n++)
            for (int quad = 0; quad < QUADS; quad++) words[n][quad] = words_at(bytes + (n * QUADS + quad) * 4);
        for (int v = 0; v < STEP_LANES; v++) {
            Words opened[HERE][QUADS];
            codes.open(v, opened[0]);
            for (int n = 0; n < HERE && most_of(KIND) == OF_8_BITS; n++)
                for (Words& code : opened[n]) code = less_half(code);
            for (int n = 0; n < HERE; n++)
                runs.put(run + n, v, 0, add_products<most_of(KIND)>(Ints{}, opened[n], words[n]));
        }
    }
}

// -- a few -------------------------------------------------------------------------------------------------------------

// Opened codes of runs, and the bytes that they meet.
struct Meeting {
    const uint8_t* codes;  // of the first run
    const int8_t* bytes;   // of the first row's first run
    int64_t row_bytes;
    bool fetches;  // codes that come later
};

// R rows, and V vectors of outputs, beginning with the v-th.
template <int R, int V, int QUADS, int MOST, bool FETCHES>
void sum_vectors(const Meeting& a, int v, Runs& runs) {
    constexpr int AT_ONCE = R * V <= 8 ? std::min({QUADS, quads_at_once(MOST), 2}) : 1;  // registers hold no more
    const uint8_t* codes = a.codes + v * 4 * WIDTH;
    const uint8_t* ahead = a.codes + FAR_AHEAD_BYTES + v * 4 * WIDTH * runs.count * QUADS;  // in a line
    const int8_t* bytes = a.bytes;
    const int64_t row_bytes = a.row_bytes;
    for (int run = 0; run < runs.count; run++, bytes += QUADS * 4) {
        Ints sum[R][V] = {};
        for (int quad = 0; quad < QUADS; quad += AT_ONCE, codes += AT_ONCE * QUAD_BYTES) {
            for (int line = 0; FETCHES && line < AT_ONCE * V * 4 * WIDTH; line += LINE_BYTES) prefetch_far(ahead + line);
            ahead += AT_ONCE * V * 4 * WIDTH;
            Words code[V][AT_ONCE];
            for (int i = 0; i < V; i++)
                for (int n = 0; n < AT_ONCE; n++) {
                    code[i][n] = load_words(reinterpret_cast<const uint32_t*>(codes + n * QUAD_BYTES + i * 4 * WIDTH));
                    if (MOST == OF_8_BITS) code[i][n] = less_half(code[i][n]);
                }
            for (int r = 0; r < R; r++) {
                Words words[AT_ONCE];
                for (int n = 0; n < AT_ONCE; n++) words[n] = words_at(bytes + r * row_bytes + (quad + n) * 4);
                for (int i = 0; i < V; i++) sum[r][i] = add_products<MOST>(sum[r][i], code[i], words);
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) runs.put(run, v + i, r, sum[r][i]);
    }
}

template <int R, int QUADS, int MOST>
void sum_rows(const Meeting& a, Runs& runs) {
    constexpr int V = most_vectors(R);
    for (int v = 0; v < STEP_LANES; v += V)
        if (MOST == OF_8_BITS && a.fetches)
            sum_vectors<R, V, QUADS, MOST, true>(a, v, runs);
        else
            sum_vectors<R, V, QUADS, MOST, false>(a, v, runs);
}

template <int QUADS, int MOST>
void sum_few(int rows, const Meeting& a, Runs& runs) {
    switch (rows) {
        case 1: return sum_rows<1, QUADS, MOST>(a, runs);
        case 2: return sum_rows<2, QUADS, MOST>(a, runs);
        case 3: return sum_rows<3, QUADS, MOST>(a, runs);
        case 4: return sum_rows<4, QUADS, MOST>(a, runs);
        case 5: return sum_rows<5, QUADS, MOST>(a, runs);
        default: return sum_rows<6, QUADS, MOST>(a, runs);
    }
}

template <int MOST>
void sum_few_of(int rows, int run_columns, const Meeting& a, Runs& runs) {
    run_columns == BLOCK ? sum_few<BLOCK_QUADS, MOST>(rows, a, runs) : sum_few<BLOCK_QUADS / 2, MOST>(rows, a, runs);
}

// Up to MOST_ROWS. most: of the codes, once they are opened
inline void sum_in_vectors(int rows, int run_columns, int most, const Meeting& a, Runs& runs) {
    switch (HAS_FOURS ? OF_8_BITS : most) {
        case 15: return sum_few_of<15>(rows, run_columns, a, runs);
        case 31: return sum_few_of<31>(rows, run_columns, a, runs);
        case 63: return sum_few_of<63>(rows, run_columns, a, runs);
        default: return sum_few_of<OF_8_BITS>(rows, run_columns, a, runs);
    }
}

// -- many --------------------------------------------------------------------------------------------------------------

constexpr int LEAST_TILE_ROWS = 12;  // fewer are as fast in vectors

// Codes of all eight bits are without signs where the processor has fours.
inline bool in_tiles(int64_t rows) { return HAS_BYTE_TILES && HAS_FOURS && rows >= LEAST_TILE_ROWS && may_use_tiles(); }

#if HAS_BYTE_TILES

// Up to sixteen rows, and all outputs.
inline void sum_in_tiles(int rows, int run_columns, const Meeting& a, Runs& runs, ByteTiles& tiles) {
    static_assert(MOST_TOGETHER == TILE && WIDTH == TILE);
    const int words = run_columns / 4;
    tiles.lay_out(rows, words);
    const int8_t* bytes = a.bytes;
    const uint8_t* codes = a.codes;
    // g++ does not know what the units read and write.
    asm volatile("" : : "r"(bytes), "r"(codes), "r"(&runs) : "memory");
    for (int run = 0; run < runs.count; run++, bytes += run_columns, codes += words * QUAD_BYTES) {
        const uint8_t* ahead = codes + AHEAD_BYTES;
        tiles.multiply(bytes, a.row_bytes, codes, runs.sum[run][0][0], [&] {
            for (int i = 0; a.fetches && i < words; i++, ahead += 64) prefetch_far(ahead);
        });
    }
    asm volatile("" : : "r"(&runs) : "memory");
}

#endif

}  // namespace
