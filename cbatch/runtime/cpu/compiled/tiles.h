// Products by tiles (AMX): 16 rows with 16 outputs, 32 columns at a time.

#pragma once
#include "problem.h"

#if defined(__AMX_TILE__)

#define TILE 16  // rows, outputs and pairs of columns

typedef struct {
    uint8_t palette, first_row, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} shapes;

#define SHAPE(t, count, bytes) all.rows[t] = (count), all.row_bytes[t] = (count) ? (bytes) : 0

// ---- bf16 ---------------------------------------------------------------------------------------
// An instruction sums the even and the odd columns of its 32 apart, each in their order, and adds
// both to what was there: a row's bits depend on nothing beside it.

// Of two tiles of so many rows, of the weights, and of both again for a last step of `rest` pairs.
// One of no rows is not there.
static void shape_pairs(long upper, long lower, long rest) {
    shapes all = {.palette = 1};
    SHAPE(0, upper, 64), SHAPE(1, lower, 64);
    SHAPE(2, upper, 64), SHAPE(3, lower, 64), SHAPE(4, TILE, 64);
    if (rest) SHAPE(5, upper, rest * 4), SHAPE(6, lower, rest * 4), SHAPE(7, rest, 64);
    _tile_loadconfig(&all);
}

// A step of the sums, tiles 0 and 1, by tiles that have its shape.
#define STEP(x_upper, x_lower, weights)                                              \
    {                                                                                \
        const char *columns = x + k * 4;                                             \
        _tile_loadd(weights, w + k * LANES * 4, LANES * 4);                          \
        _tile_loadd(x_upper, columns, of->x_stride);                                 \
        _tile_dpbf16ps(0, x_upper, weights);                                         \
        if (lower) {                                                                 \
            _tile_loadd(x_lower, columns + TILE * of->x_stride, of->x_stride);       \
            _tile_dpbf16ps(1, x_lower, weights);                                     \
        }                                                                            \
    }

// All rows with the panels from `first` to before `last`.
static void tiled_band(const problem *of, const segment *of_w, long rows, long first, long last) {
    const long steps = (of->by->in + 1) / 2, rest = steps % TILE;
    const long bytes = panel_bytes(of_w, of->by->in);
    _Alignas(64) float sums[2 * TILE][LANES];
    for (long r = 0; r < rows; r += 2 * TILE) {
        const long upper = least(rows - r, TILE), lower = least(rows - r - upper, TILE);
        const char *x = of->x + r * of->x_stride;
        shape_pairs(upper, lower, rest);
        for (long p = first; p < last; p++) {
            const char *w = of_w->panels + p * bytes;
            long k = 0;
            _tile_zero(0);
            if (lower) _tile_zero(1);
            for (; k + TILE <= steps; k += TILE) {
                if (rows <= 2 * TILE)
                    UNROLLED for (int line = 0; line < TILE; line++)
                        __builtin_prefetch(w + k * LANES * 4 + AHEAD + line * 64, 0, 2);
                STEP(2, 3, 4)
            }
            if (rest) STEP(5, 6, 7)
            _tile_stored(0, sums, LANES * 4);
            if (lower) _tile_stored(1, sums + TILE, LANES * 4);
            const outputs at = outputs_of(of_w, p);
            for (long i = 0; i < upper + lower; i++) put(of, at, r + i, load(sums[i]));
        }
    }
    _tile_release();
}
#undef STEP

// ---- blocks -------------------------------------------------------------------------------------
// Integers are summed by tiles, a cell at a time; the rest is as in `cells`, whose bits these are.

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
        _tile_loadd(1, x + cell * sizeof(coded), stride);
        _tile_loadd(2, f.bits < 8 ? (const char *)codes : at, CODE_BYTES);
        _tile_zero(0);
        _tile_dpbsud(0, 1, 2);
        _tile_stored(0, products, CODE_BYTES);
        const scale by = scale_of(f, scales, cell);
        UNROLLED for (int r = 0; r < TILE; r++) {
            const coded *of = (const coded *)(x + r * stride) + cell;
            const ints product = products[r] - f.offset * (of->sums[0] + of->sums[1]);
            sums[r] += by.s[0] * all(of->by) * __builtin_convertvector(product, vec);
            if (f.scales == DM || f.scales == SIXES) sums[r] += by.m * all(of->weighed);
        }
    }
}

// Returns how many rows it has done: as many as fill tiles.
INLINE long tiled_block_band(const problem *of, const segment *of_w, form f, long rows, long first,
                             long last) {
    const long bytes = block_panel_bytes(f, of->by->in);
    if (rows < TILE) return 0;
    shape_cells();
    long r = 0;
    for (; r + TILE <= rows; r += TILE)
        for (long p = first; p < last; p++) {
            vec found[TILE];
            tiled_cells(of_w->panels + p * bytes, of->by->in, f, of->x + r * of->x_stride,
                        of->x_stride, found);
            const outputs at = outputs_of(of_w, p);
            for (int i = 0; i < TILE; i++) put(of, at, r + i, found[i]);
        }
    _tile_release();
    return r;
}
#undef SHAPE
#endif
