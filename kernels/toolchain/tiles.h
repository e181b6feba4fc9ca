// The matrix units of a processor (AMX): one instruction multiplies up to sixteen rows of pairs of bfloat16 with sixteen
// columns of sixteen pairs each, and adds that to float32. `Panel`s of 64 columns are read as vectors read them. A sum's
// order is another than that of vectors, but the same for any number of rows: so what has one order on a machine goes
// this way always, or never.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace {

constexpr int TILE = 16;  // rows, or columns, or words of a row, that a tile has
constexpr int COLUMNS = 64, COLUMN_BYTES = 4 * COLUMNS;  // of a panel, and of sums

}  // namespace

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)

#define HAS_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

namespace {

// The system lends the units' registers to a process that asks for them.
inline bool may_use_tiles() {
    constexpr long ASK_FOR = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool may = syscall(SYS_arch_prctl, ASK_FOR, TILE_DATA) == 0;
    return may;
}

// Up to 32 rows, `stride_bytes` apart. Their words end with a whole tile.
struct TileRows {
    const void* first;
    int64_t stride_bytes;
    int count;
};

struct Columns {
    int from = 0, to = COLUMNS;

    int count() const { return to - from; }
};

// What `ldtilecfg` reads.
struct alignas(64) TileLayout {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Of one thread.
class Tiles {
  public:
    static constexpr int MOST_ROWS = 2 * TILE;

    // How often `multiply` calls `fetch`.
    static int64_t fetches(int rows, int64_t words, int columns) {
        return (words + TILE - 1) / TILE * (columns / TILE) * (rows > TILE ? 2 : 1);
    }

    ~Tiles() {
        if (upper_) _tile_release();
    }

    // sums[r][n] (+)= sum over w of rows[r][w] * panel[w][n], pairs by pairs, for some columns n: all, or either half.
    // panel: [words][64]; sums: [rows][64], their rows `sum_stride` numbers apart. fetch: called now and then, to have
    // memory fetched meanwhile
    template <class Function>
    void multiply(TileRows rows, const uint32_t* panel, int64_t words, Columns columns, bool is_new, float* sums,
                  int64_t sum_stride, Function fetch) {
        const int upper = rows.count > TILE ? (rows.count + 1) / 2 : rows.count;
        const int lower = rows.count > TILE ? rows.count / 2 : 0;
        lay_out(upper, lower);
        const int64_t whole = words / TILE * TILE;
        if (whole < words) {  // words that the panel does not have are zero
            std::memset(rest_, 0, sizeof rest_);
            std::memcpy(rest_, panel + whole * COLUMNS, (words - whole) * COLUMN_BYTES);
        }
        const char* x = static_cast<const char*>(rows.first);
        // g++ does not know that tiles are loaded from memory, and might write what they load later.
        asm volatile("" : : "r"(x), "r"(panel), "r"(rest_), "r"(sums) : "memory");
        const Sums to{sums + columns.from, 4 * sum_stride, is_new};
        const auto words_at = [&](int64_t w) { return (w < whole ? panel + w * COLUMNS : rest_) + columns.from; };
        if (rows.count > TILE)
            two_tiles_of_rows(x, x + upper * rows.stride_bytes, rows.stride_bytes, words, words_at, columns.count(), to,
                              Sums{sums + upper * sum_stride + columns.from, 4 * sum_stride, is_new}, fetch);
        else if (columns.count() == COLUMNS)
            one_tile_of_rows<true>(x, rows.stride_bytes, words, words_at, to, fetch);
        else
            one_tile_of_rows<false>(x, rows.stride_bytes, words, words_at, to, fetch);
    }

    // The same sums the other way around, of a few rows as columns: sums[r][n] = sum over w of rows[r][w] * columns[w][n].
    // Sixteen rows each lie `stride_bytes` apart, and the n-th sixteen begin at first[n]. words: whole tiles; columns:
    // [words][16], of which `count` are of use; sums: [16 * sixteens][16]; fetch: called for each tile of rows
    template <class Function>
    void meet_columns(const void* const* first, int sixteens, int64_t stride_bytes, const uint32_t* columns, int count,
                      int64_t words, float* sums, Function fetch) {
        lay_out(count, 0);
        asm volatile("" : : "r"(columns), "r"(sums) : "memory");
        for (int n = 0; n < sixteens; n++) {
            const char* rows = static_cast<const char*>(first[n]);
            _tile_zero(5);
            for (int64_t w = 0; w < words; w += TILE) {
                _tile_loadd(6, rows + 4 * w, stride_bytes);
                _tile_loadd(7, columns + w * TILE, 4 * TILE);
                fetch();
                _tile_dpbf16ps(5, 6, 7);
            }
            _tile_stored(5, sums + n * TILE * TILE, 4 * TILE);
        }
        asm volatile("" : : "r"(sums) : "memory");
    }

  private:
    struct Sums {
        float* first;
        int64_t stride_bytes;
        bool are_new;

        Sums behind(int columns) const { return {first + columns, stride_bytes, are_new}; }
    };

    // Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 of a panel. upper, lower: rows of the first and of the second; 0: there is
    // no second, and tile 5 is a whole one
    void lay_out(int upper, int lower) {
        if (upper == upper_ && lower == lower_) return;
        upper_ = upper, lower_ = lower;
        TileLayout layout;
        const int second = lower ? lower : upper;
        const int rows[] = {upper, upper, second, second, upper, lower ? lower : TILE, TILE, TILE};
        for (int t = 0; t < 8; t++) layout.rows[t] = uint8_t(rows[t]), layout.row_bytes[t] = 4 * TILE;
        _tile_loadconfig(&layout);
    }

    // All columns in one pass: 64, or half of them.
    template <bool ALL, class WordsAt, class Function>
    static void one_tile_of_rows(const char* x, int64_t stride, int64_t words, WordsAt words_at, Sums sums,
                                 Function fetch) {
        begin<0>(sums);
        if (ALL) begin<2>(sums.behind(2 * TILE));
        for (int64_t w = 0; w < words; w += TILE) {
            const uint32_t* panel = words_at(w);
            _tile_loadd(4, x + 4 * w, stride);
            _tile_loadd(6, panel, COLUMN_BYTES);
            fetch();
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + TILE, COLUMN_BYTES);
            fetch();
            _tile_dpbf16ps(1, 4, 7);
            if (!ALL) continue;
            _tile_loadd(6, panel + 2 * TILE, COLUMN_BYTES);
            fetch();
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, panel + 3 * TILE, COLUMN_BYTES);
            fetch();
            _tile_dpbf16ps(3, 4, 7);
        }
        end<0>(sums);
        if (ALL) end<2>(sums.behind(2 * TILE));
    }

    // 32 columns in a pass, so that each tile that is loaded meets two others.
    template <class WordsAt, class Function>
    static void two_tiles_of_rows(const char* x, const char* lower_x, int64_t stride, int64_t words, WordsAt words_at,
                                  int columns, Sums sums, Sums lower_sums, Function fetch) {
        for (int n = 0; n < columns; n += 2 * TILE, sums.first += 2 * TILE, lower_sums.first += 2 * TILE) {
            begin<0>(sums);
            begin<2>(lower_sums);
            for (int64_t w = 0; w < words; w += TILE) {
                const uint32_t* panel = words_at(w) + n;
                _tile_loadd(4, x + 4 * w, stride);
                _tile_loadd(6, panel, COLUMN_BYTES);
                fetch();
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, panel + TILE, COLUMN_BYTES);
                fetch();
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, lower_x + 4 * w, stride);
                fetch();
                _tile_dpbf16ps(2, 5, 6);
                fetch();
                _tile_dpbf16ps(3, 5, 7);
            }
            end<0>(sums);
            end<2>(lower_sums);
        }
    }

    // Tiles of sums that lie side by side: 0 and 1, or 2 and 3. What numbers a tile is no variable for g++.
    template <int FIRST>
    static void begin(Sums sums) {
        static_assert(FIRST == 0 || FIRST == 2);
        float* second = sums.first + TILE;
        if (FIRST == 0) {
            if (sums.are_new) {
                _tile_zero(0);
                _tile_zero(1);
            } else {
                _tile_loadd(0, sums.first, sums.stride_bytes);
                _tile_loadd(1, second, sums.stride_bytes);
            }
        } else {
            if (sums.are_new) {
                _tile_zero(2);
                _tile_zero(3);
            } else {
                _tile_loadd(2, sums.first, sums.stride_bytes);
                _tile_loadd(3, second, sums.stride_bytes);
            }
        }
    }

    template <int FIRST>
    static void end(Sums sums) {
        float* second = sums.first + TILE;
        if (FIRST == 0) {
            _tile_stored(0, sums.first, sums.stride_bytes);
            _tile_stored(1, second, sums.stride_bytes);
        } else {
            _tile_stored(2, sums.first, sums.stride_bytes);
            _tile_stored(3, second, sums.stride_bytes);
        }
    }

    int upper_ = 0, lower_ = 0;
    alignas(64) uint32_t rest_[TILE * COLUMNS];
};

}  // namespace

#else

#define HAS_TILES 0

namespace {

inline bool may_use_tiles() { return false; }

struct Tiles {};

}  // namespace

#endif
