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

// Configures the tiles: 4 and 5 have `upper` and `lower` rows, 6 and 7 the weights of two panels. 0
// and 1 are the sums of those rows with the first panel, 2 and 3 with the second.
static void shape_pairs(long upper, long lower) {
    shapes all = {.palette = 1};
    SHAPE(0, upper, TILE_BYTES), SHAPE(1, lower, TILE_BYTES);
    SHAPE(2, upper, TILE_BYTES), SHAPE(3, lower, TILE_BYTES);
    SHAPE(4, upper, TILE_BYTES), SHAPE(5, lower, TILE_BYTES);
    SHAPE(6, TILE, TILE_BYTES), SHAPE(7, TILE, TILE_BYTES);
    _tile_loadconfig(&all);
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
// Tiles sum integers, one cell at a time. The rest is as in `multiply_cells`, with the same bits.

static void shape_cells(void) {
    shapes all = {.palette = 1};
    SHAPE(0, TILE, 64), SHAPE(1, TILE, CELL), SHAPE(2, CELL / 4, 64);
    _tile_loadconfig(&all);
}

INLINE void tiled_cells(const char *panel, long in, form f, const char *x, long stride, vec *sums) {
    const long count = in / CELL;
    const char *scales = panel + count * cell_bytes(f);
    _Alignas(64) ints codes[8], products[TILE];
    UNROLLED for (int r = 0; r < TILE; r++) sums[r] = (vec){0};
    for (long cell = 0; cell < count; cell++) {
        const char *at = panel + cell * cell_bytes(f);
        if (f.bits < 8) unpack(f, at, codes);
        WRITTEN();
        _tile_loadd(1, x + cell * sizeof(coded), stride);
        _tile_loadd(2, f.bits < 8 ? (const char *)codes : at, CODE_BYTES);
        _tile_zero(0);
        _tile_dpbsud(0, 1, 2);
        _tile_stored(0, products, CODE_BYTES);
        const scale by = scale_of(f, scales, cell);
        UNROLLED for (int r = 0; r < TILE; r++) {
            const coded *row = (const coded *)(x + r * stride) + cell;
            const ints product = products[r] - f.offset * (row->sums[0] + row->sums[1]);
            sums[r] += by.s[0] * all(row->factor) * __builtin_convertvector(product, vec);
            if (has_offsets(f)) sums[r] += by.m[0] * all(row->code_sum);
        }
    }
}

// Multiplies the rows that fill whole tiles; returns their number.
INLINE long tiled_block_band(const problem *args, const segment *part, form f, long rows,
                             long first, long last) {
    const long bytes = block_panel_bytes(f, args->weights->in);
    if (rows < TILE) return 0;
    shape_cells();
    long r = 0;
    for (; r + TILE <= rows; r += TILE)
        for (long p = first; p < last; p++) {
            vec sums[TILE];
            tiled_cells(part->panels + p * bytes, args->weights->in, f,
                        args->x + r * args->x_stride, args->x_stride, sums);
            const outputs at = outputs_of(part, p);
            for (int i = 0; i < TILE; i++) write_outputs(args, at, r + i, sums[i]);
        }
    _tile_release();
    return r;
}
#endif
