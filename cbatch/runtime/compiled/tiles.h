// Products by AMX tiles: 16 rows by 16 outputs, 32 columns at a time.

#pragma once
#include "problem.h"

#if defined(__AMX_TILE__)

#define TILE 16  // rows, outputs, or pairs of columns of a tile

typedef struct {
    uint8_t palette, first_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} shapes;

// Makes earlier writes visible to tile loads: some compilers do not know that these read memory.
#define WRITTEN() __asm__ volatile("" ::: "memory")

#define SHAPE(t, count, bytes) all.rows[t] = (count), all.row_bytes[t] = (count) ? (bytes) : 0

// ---- bf16 ---------------------------------------------------------------------------------------
// An instruction takes 32 columns. It sums the even and the odd columns separately, each in order,
// and adds both sums to the tile. So a row's bits do not depend on other rows.

#define TILE_BYTES 64  // bytes of a tile's row

// Without a barrier GCC 12 drops writes to the shapes: it knows only of a read of 8 bytes.
INLINE void configure_tiles(const shapes *all) {
    WRITTEN();
    _tile_loadconfig(all);
}

// Configures the tiles: 4 and 5 have `upper` and `lower` rows, 6 and 7 the weights of two panels. 0
// and 1 are the sums of those rows with the first panel, 2 and 3 with the second.
static void shape_pairs(long upper, long lower) {
    shapes all = {.palette = 1};
    SHAPE(0, upper, TILE_BYTES), SHAPE(1, lower, TILE_BYTES);
    SHAPE(2, upper, TILE_BYTES), SHAPE(3, lower, TILE_BYTES);
    SHAPE(4, upper, TILE_BYTES), SHAPE(5, lower, TILE_BYTES);
    SHAPE(6, TILE, TILE_BYTES), SHAPE(7, TILE, TILE_BYTES);
    configure_tiles(&all);
}

// Adds 32 more columns to the sums. Inlined: the last two arguments are constants.
INLINE void tiled_step(const char *x, long stride, const char *w, const char *w_second, int lower,
                       int second) {
    _tile_loadd(6, w, TILE_BYTES);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (second) {
        _tile_loadd(7, w_second, TILE_BYTES);
        _tile_dpbf16ps(2, 4, 7);
    }
    if (lower) {
        _tile_loadd(5, x + TILE * stride, stride);
        _tile_dpbf16ps(1, 5, 6);
        if (second) _tile_dpbf16ps(3, 5, 7);
    }
}

// Copies the last columns of all rows, fewer than 32, padded with zeros.
static __attribute__((noinline)) void copy_padded(const char *x, long stride, long rows,
                                                  long row_bytes, char (*to)[TILE_BYTES]) {
    memset(to, 0, rows * TILE_BYTES);
    for (long r = 0; r < rows; r++) memcpy(to[r], x + r * stride, row_bytes);
}

INLINE void tiled_sums(const char *x, long stride, long rows, const char *w, const char *w_second,
                       long in, int ahead, int lower, int second) {
    const long steps = (in + 1) / 2;
    long k = 0;
    _tile_zero(0);
    if (lower) _tile_zero(1);
    if (second) _tile_zero(2);
    if (lower && second) _tile_zero(3);
    for (; k + TILE <= steps; k += TILE) {
        const char *at = w + k * TILE_BYTES, *at_second = w_second + k * TILE_BYTES;
        if (ahead) UNROLLED for (int line = 0; line < TILE; line++) {
            __builtin_prefetch(at + AHEAD + line * TILE_BYTES, 0, 2);
            if (second) __builtin_prefetch(at_second + AHEAD + line * TILE_BYTES, 0, 2);
        }
        tiled_step(x + k * 4, stride, at, at_second, lower, second);
    }
    if (k == steps) return;
    _Alignas(64) char rest[2 * TILE][TILE_BYTES], rest_w[2][TILE][TILE_BYTES];
    copy_padded(x + k * 4, stride, rows, (steps - k) * 4, rest);
    memset(rest_w, 0, sizeof rest_w);
    memcpy(rest_w[0], w + k * TILE_BYTES, (steps - k) * TILE_BYTES);
    if (second) memcpy(rest_w[1], w_second + k * TILE_BYTES, (steps - k) * TILE_BYTES);
    WRITTEN();
    tiled_step(rest[0], TILE_BYTES, rest_w[0][0], rest_w[1][0], lower, second);
}

typedef struct {
    _Alignas(64) float panels[2][2 * TILE][LANES];
} tile_sums;

INLINE void tiled_panels(const char *x, long stride, long rows, const char *w, const char *w_second,
                         long in, int ahead, int second, tile_sums *sums) {
    const int lower = rows > TILE;
    if (lower) tiled_sums(x, stride, rows, w, w_second, in, ahead, 1, second);
    else tiled_sums(x, stride, rows, w, w_second, in, ahead, 0, second);
    _tile_stored(0, sums->panels[0], TILE_BYTES);
    if (lower) _tile_stored(1, sums->panels[0] + TILE, TILE_BYTES);
    if (second) _tile_stored(2, sums->panels[1], TILE_BYTES);
    if (lower && second) _tile_stored(3, sums->panels[1] + TILE, TILE_BYTES);
}

static void write_gated(const problem *args, long row, long column, vec gate, vec up) {
    const float *bias = args->weights->bias;
    const long half = args->weights->parts->out / 2;
    if (bias) gate += load(bias + column), up += load(bias + half + column);
    const __m256bh values = _mm512_cvtneps_pbh((__m512)(silu(gate) * up));
    memcpy(args->gated + row * args->gated_stride + column * 2, &values, sizeof values);
}

// Prefetches the cache lines of y that one or two panels write for `rows` rows from `row` on.
// Inlined: compilers remove a call without other effects.
INLINE void prefetch_outputs(const problem *args, const segment *part, long panel, long row,
                             long rows, int second) {
    const outputs at = outputs_of(part, panel), at_second = outputs_of(part, panel + 1);
    for (long i = row; i < row + rows; i++)
        if (args->gated)
            __builtin_prefetch(args->gated + i * args->gated_stride + panel * LANES * 2, 1, 3);
        else {
            __builtin_prefetch(args->y + i * args->y_stride + at.column, 1, 3);
            if (second) __builtin_prefetch(args->y + i * args->y_stride + at_second.column, 1, 3);
        }
}

// Multiplies all rows by the panels [first, last): two adjacent panels at a time, or with `gated` a
// panel of gates with its panel of ups.
static void tiled_band(const problem *args, const segment *part, long rows, long first, long last) {
    const long in = args->weights->in, bytes = panel_bytes(part, in);
    const long apart = args->gated ? panels_of(part) / 2 : 1;
    tile_sums sums;
    for (long r = 0; r < rows; r += 2 * TILE) {
        const long here = min_long(rows - r, 2 * TILE);
        const char *x = args->x + r * args->x_stride;
        if (!r || here < 2 * TILE) shape_pairs(min_long(here, TILE), max_long(here - TILE, 0));
        for (long p = first; p < last; p += args->gated ? 1 : 2) {
            const char *w = part->panels + p * bytes;
            const int second = args->gated || p + 1 < last;
            prefetch_outputs(args, part, p, r, here, second);
            if (second)
                tiled_panels(x, args->x_stride, here, w, w + apart * bytes, in, !r, 1, &sums);
            else tiled_panels(x, args->x_stride, here, w, w, in, !r, 0, &sums);
            const outputs at = outputs_of(part, p), at_second = outputs_of(part, p + 1);
            for (long i = 0; i < here; i++) {
                const vec first_sum = load(sums.panels[0][i]), second_sum = load(sums.panels[1][i]);
                if (args->gated) write_gated(args, r + i, p * LANES, first_sum, second_sum);
                else write_outputs(args, at, r + i, first_sum);
                if (!args->gated && second) write_outputs(args, at_second, r + i, second_sum);
            }
        }
    }
    _tile_release();
}

// ---- blocks -------------------------------------------------------------------------------------
// Tiles sum integers, a cell or half a cell at a time. The rest is as in `multiply_cells`, with the
// same bits.

// Cells that are unpacked at a time, and then multiplied: a tile load waits for stores of vectors, and
// a vector load for stores of tiles, so each step writes several results before the next reads any.
#define GROUP 4
#define TILED_ROWS 64      // rows whose cells of a group stay in L1
#define MIN_TILED_ROWS 12  // fewer rows are faster without tiles

static void shape_cells(form f, long rows) {
    const long columns = CELL / halves_of(f);
    shapes all = {.palette = 1};
    SHAPE(0, rows, 64), SHAPE(1, rows, columns), SHAPE(2, columns / 4, 64);
    SHAPE(3, rows, 64), SHAPE(4, rows, columns), SHAPE(5, columns / 4, 64);
    configure_tiles(&all);
}

#define MULTIPLY_CODES(SUM, X, W, x, stride, codes, to) \
    _tile_loadd(W, codes, CODE_BYTES);                  \
    _tile_loadd(X, x, stride);                          \
    _tile_zero(SUM);                                    \
    _tile_dpbsud(SUM, X, W);                            \
    _tile_stored(SUM, to, CODE_BYTES);

// Adds `count` cells, at most GROUP, to the sums of `rows` rows, which are tiles of `tile` rows.
INLINE void tiled_cells(const char *panel, long in, form f, long cell, const int count,
                        const char *x, long stride, long rows, long tile, vec *sums) {
    const char *scales = panel + in / CELL * cell_bytes(f);
    const int halves = halves_of(f), columns = CELL / halves;
    _Alignas(64) ints codes[GROUP * 8], products[2 * GROUP][TILE];
    scale by[GROUP];
    UNROLLED for (int c = 0; c < count; c++) {
        if (f.bits < 8) unpack(f, panel + (cell + c) * cell_bytes(f), codes + c * 8);
        by[c] = scale_of(f, scales, cell + c);
    }
    x += cell * sizeof(coded);
    for (long r = 0; r < rows; r += tile, x += tile * stride, sums += tile) {
        WRITTEN();
        UNROLLED for (int c = 0; c < count * halves; c++) {
            const char *cells = x + c / halves * sizeof(coded) + c % halves * columns;
            const char *w = f.bits < 8 ? (const char *)(codes + c * columns / 4)
                                       : panel + (cell * halves + c) * columns * LANES;
            if (c % 2) { MULTIPLY_CODES(0, 1, 2, cells, stride, w, products[c]) }
            else { MULTIPLY_CODES(3, 4, 5, cells, stride, w, products[c]) }
        }
        WRITTEN();
        for (long i = 0; i < tile; i++) {
            const coded *row = (const coded *)(x + i * stride);
            vec sum = sums[i];
            UNROLLED for (int c = 0; c < count; c++, row++) {
                UNROLLED for (int h = 0; h < halves; h++) {
                    const int32_t all_codes = halves == 2 ? row->sums[h] : row->sums[0] + row->sums[1];
                    const ints product = products[c * halves + h][i] - f.offset * all_codes;
                    sum += by[c].s[h] * all(row->factor) * __builtin_convertvector(product, vec);
                    if (f.scales == FOURS) sum += by[c].m[h] * all(row->factor * (float)all_codes);
                }
                if (has_offsets(f) && halves == 1) sum += by[c].m[0] * all(row->code_sum);
            }
            sums[i] = sum;
        }
    }
}

// Multiplies `rows` rows from `row` on, at most TILED_ROWS, in tiles of `tile` rows.
INLINE void tiled_block_rows(const problem *args, const segment *part, form f, long row, long rows,
                             long tile, long first, long last) {
    const long in = args->weights->in, bytes = block_panel_bytes(f, in), stride = args->x_stride;
    const char *x = args->x + row * stride;
    for (long p = first; p < last; p++) {
        const char *panel = part->panels + p * bytes;
        const outputs at = outputs_of(part, p);
        vec sums[TILED_ROWS];
        long cell = 0;
        for (long r = 0; r < rows; r++) sums[r] = all(0);
        for (; cell + GROUP <= in / CELL; cell += GROUP)
            tiled_cells(panel, in, f, cell, GROUP, x, stride, rows, tile, sums);
        for (; cell < in / CELL; cell++)
            tiled_cells(panel, in, f, cell, 1, x, stride, rows, tile, sums);
        for (long r = 0; r < rows; r++) write_outputs(args, at, row + r, sums[r]);
    }
}

// Multiplies all rows but a few; returns their number.
INLINE long tiled_block_band(const problem *args, const segment *part, form f, long rows,
                             long first, long last) {
    long r = 0;
    while (rows - r >= MIN_TILED_ROWS) {
        const long tile = min_long(rows - r, TILE);
        const long count = min_long((rows - r) / tile * tile, TILED_ROWS);
        if (!r || tile < TILE) shape_cells(f, tile);
        tiled_block_rows(args, part, f, r, count, tile, first, last);
        r += count;
    }
    if (r) _tile_release();
    return r;
}
#endif
