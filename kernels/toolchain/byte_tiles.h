// The matrix units of a processor (AMX) for bytes: one instruction multiplies up to sixteen rows of words of four bytes with
// sixteen columns of such words, and adds that to whole numbers of 32 bits: exactly, so that no order counts.

#pragma once

#include <cstdint>

#include "tiles.h"

#if HAS_TILES && defined(__AMX_INT8__)

#define HAS_BYTE_TILES 1

namespace {

// Of one thread.
class ByteTiles {
  public:
    static constexpr int SUMS = TILE * TILE;  // of sixteen rows with sixteen columns

    ~ByteTiles() {
        if (rows_) _tile_release();
    }

    // Rows of x and words of each, for the calls of `multiply` to come.
    void lay_out(int rows, int words) {
        if (rows == rows_ && words == words_) return;
        rows_ = rows, words_ = words;
        TileLayout layout;
        const int of_rows[] = {rows, rows, rows, rows, rows, words, words}, bytes = 4 * TILE;
        for (int t = 0; t < 7; t++) layout.rows[t] = uint8_t(of_rows[t]), layout.row_bytes[t] = uint16_t(bytes);
        layout.row_bytes[4] = uint16_t(4 * words);
        _tile_loadconfig(&layout);
    }

    // sums[n / 16][r][n % 16] = sum over the bytes b of x[r][b] * codes[b / 4][n][b % 4], for 64 columns n. x has signs,
    // codes have none. x: rows `x_stride` bytes apart; codes: [words][64] words; fetch: called for each tile of codes
    template <class Function>
    void multiply(const int8_t* x, int64_t x_stride, const uint8_t* codes, int32_t* sums, Function fetch) {
        constexpr int STRIDE = COLUMN_BYTES;
        _tile_loadd(4, x, x_stride);
        _tile_loadd(5, codes, STRIDE);
        _tile_zero(0);
        fetch();
        _tile_dpbsud(0, 4, 5);
        _tile_loadd(6, codes + 4 * TILE, STRIDE);
        _tile_zero(1);
        fetch();
        _tile_dpbsud(1, 4, 6);
        _tile_loadd(5, codes + 8 * TILE, STRIDE);
        _tile_zero(2);
        fetch();
        _tile_dpbsud(2, 4, 5);
        _tile_loadd(6, codes + 12 * TILE, STRIDE);
        _tile_zero(3);
        fetch();
        _tile_dpbsud(3, 4, 6);
        _tile_stored(0, sums, 4 * TILE);
        _tile_stored(1, sums + SUMS, 4 * TILE);
        _tile_stored(2, sums + 2 * SUMS, 4 * TILE);
        _tile_stored(3, sums + 3 * SUMS, 4 * TILE);
    }

  private:
    int rows_ = 0, words_ = 0;
};

}  // namespace

#else

#define HAS_BYTE_TILES 0

namespace {

struct ByteTiles {};

}  // namespace

#endif
