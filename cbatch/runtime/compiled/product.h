// y = x W^T + bias for rows of fp32. W is of fp32, bf16 or a block type (see blocks.h),
// in panels of LANES outputs. Panels of fp32 and bf16 have all columns one after another, bf16
// columns in pairs (the even column in the low half). If the processor multiplies pairs of bf16,
// rows are rounded to bf16 first.
//
// Each output is summed over the columns in their order. So the bits of a row depend neither on the
// number of rows in the product nor on the number of threads.

#pragma once
#include "problem.h"
#include "team.h"
#include "tiles.h"

// Multiplies `rows` rows from `row` on by `panels` panels from `panel` on. Inlined: the last three
// arguments are constants.
INLINE void tile(const problem *args, const segment *part, long row, long panel, int half, int rows,
                 int panels) {
    const long in = args->weights->in, stride = args->x_stride / 4, bytes = panel_bytes(part, in);
    const float *x = (const float *)args->x + row * stride;
    const char *w = part->panels + panel * bytes;
    vec sums[ROWS][WIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < panels; p++) sums[r][p] = (vec){0};
    for (long k = 0; k + 2 <= in; k += 2) {
        pairs both[WIDE];
        UNROLLED for (int p = 0; p < panels; p++) {
            const char *from = w + p * bytes + k * LANES * (half ? 2 : 4);
            if (rows <= FEW) __builtin_prefetch(from + AHEAD, 0, 2);
            if (half) both[p] = *(const pairs *)from;
        }
        UNROLLED for (int i = 0; i < 2; i++) {
            vec column[WIDE];
            UNROLLED for (int p = 0; p < panels; p++) {
                const char *from = w + p * bytes + (k + i) * LANES * 4;
                if (!half) column[p] = *(const vec *)from;
                else column[p] = i ? (vec)(both[p] & 0xffff0000u) : (vec)(both[p] << 16);
            }
            UNROLLED for (int r = 0; r < rows; r++) {
                const float each = x[r * stride + k + i];
                UNROLLED for (int p = 0; p < panels; p++) sums[r][p] += each * column[p];
            }
        }
    }
    if (in % 2)  // the last column
        for (int p = 0; p < panels; p++) {
            const char *from = w + p * bytes + (in - 1) * LANES * (half ? 2 : 4);
            const vec column = half ? (vec)(*(const pairs *)from << 16) : *(const vec *)from;
            for (int r = 0; r < rows; r++) sums[r][p] += x[r * stride + in - 1] * column;
        }
    for (int p = 0; p < panels; p++) {
        const outputs at = outputs_of(part, panel + p);
        for (int r = 0; r < rows; r++) write_outputs(args, at, row + r, sums[r][p]);
    }
}

#if defined(__AVX512BF16__)
// Does the same by pairs of columns. If there are several full tiles of rows, each prefetches one
// cache line in `turns` of the next band, `next` panels ahead. A single full tile, or one of few
// rows, prefetches its own panels.
INLINE void pair_tile(const problem *args, const segment *part, long row, long panel, long next,
                      long turns, int rows, int panels) {
    const long steps = (args->weights->in + 1) / 2, bytes = panel_bytes(part, args->weights->in);
    const char *x = args->x + row * args->x_stride, *w = part->panels + panel * bytes;
    __m512 sums[ROWS][WIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < panels; p++) sums[r][p] = _mm512_setzero_ps();
    const long ahead = turns > 1 ? next * bytes : AHEAD;
    long due = row / ROWS;
    for (long k = 0; k < steps; k++) {
        __m512bh columns[WIDE];
        if (rows == ROWS && k == due) {
            due += turns;
            UNROLLED for (int p = 0; p < panels; p++)
                __builtin_prefetch(w + ahead + p * bytes + k * LANES * 4, 0, 2);
        }
        UNROLLED for (int p = 0; p < panels; p++) {
            const char *from = w + p * bytes + k * LANES * 4;
            if (rows <= FEW) __builtin_prefetch(from + AHEAD, 0, 2);
            columns[p] = (__m512bh)_mm512_load_si512(from);
        }
        UNROLLED for (int r = 0; r < rows; r++) {
            int32_t two;
            memcpy(&two, x + r * args->x_stride + k * 4, 4);
            const __m512bh each = (__m512bh)_mm512_set1_epi32(two);
            UNROLLED for (int p = 0; p < panels; p++)
                sums[r][p] = _mm512_dpbf16_ps(sums[r][p], columns[p], each);
        }
    }
    UNROLLED for (int p = 0; p < panels; p++) {
        const outputs at = outputs_of(part, panel + p);
        UNROLLED for (int r = 0; r < rows; r++) write_outputs(args, at, row + r, (vec)sums[r][p]);
    }
}
#endif

// `kind`: F32; BF16, converted to fp32; PAIRED, bf16 multiplied by pairs.
#define PAIRED -1
INLINE void any_tile(const problem *args, const segment *part, long row, long panel, long next,
                     long turns, int kind, int rows, int panels) {
    (void)next, (void)turns;
#if defined(__AVX512BF16__)
    if (kind == PAIRED) pair_tile(args, part, row, panel, next, turns, rows, panels);
    else
#endif
        tile(args, part, row, panel, kind == BF16, rows, panels);
}

#define TILES(R, P) \
    for (; p + (P) <= last; p += (P)) \
        any_tile(args, part, r, p, last - first, rows / ROWS, kind, R, P);
#define PANELS(R, P)   \
    {                  \
        long p = first; \
        TILES(R, P)    \
        TILES(R, FULL) \
        TILES(R, 1)    \
    }

// Multiplies all rows by the panels [first, last), whose weights stay in a cache meanwhile.
INLINE void band(const problem *args, const segment *part, long rows, long first, long last,
                 int kind) {
    long r = 0;
    for (; r + ROWS <= rows; r += ROWS) PANELS(ROWS, FULL)
    switch (rows - r) {
    case 1: PANELS(1, WIDE) break;
    case 2: PANELS(2, WIDE) break;
#if ROWS == 4
    case 3: PANELS(3, FULL) break;
#else
    case 3: PANELS(3, WIDE) break;
    case 4: PANELS(4, WIDE) break;
    case 5: PANELS(5, FULL) break;
    case 6: PANELS(6, FULL) break;
    case 7: PANELS(7, FULL) break;
#endif
    }
}

// Multiplies a few rows by one panel of a block type. A row's result does not depend on `rows`.
INLINE void block_tile(const problem *args, const segment *part, form f, long row, long panel,
                       int rows) {
    vec sums[ROWS];
    const long in = args->weights->in;
    multiply_cells(part->panels + panel * block_panel_bytes(f, in), in, f,
                   args->x + row * args->x_stride, args->x_stride, !row, rows, sums);
    const outputs at = outputs_of(part, panel);
    for (int r = 0; r < rows; r++) write_outputs(args, at, row + r, sums[r]);
}

#define BLOCK_ROWS(R)                              \
    for (; r + (R) <= rows; r += (R))              \
        for (long p = first; p < last; p++) block_tile(args, part, f, r, p, R);

// Multiplies the rows from `r` on.
INLINE void block_band(const problem *args, const segment *part, form f, long r, long rows,
                       long first, long last) {
    BLOCK_ROWS(ROWS)
#if ROWS == 8
    BLOCK_ROWS(4)
#endif
    BLOCK_ROWS(2)
    BLOCK_ROWS(1)
}

#define EACH_TYPE(X)                                                                \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) \
    X(IQ4_NL) X(IQ4_XS) X(MXFP4)

// One function for each type: in a larger one GCC allocates registers worse.
#define BAND(T)                                                                                   \
    static __attribute__((noinline)) void band_of_##T(const problem *args, const segment *part,   \
                                                      long r, long rows, long first, long last) { \
        block_band(args, part, form_of(T), r, rows, first, last);                                 \
    }
EACH_TYPE(BAND)

#if defined(__AMX_TILE__)
#define TILED_BAND(T)                                                                            \
    static __attribute__((noinline)) long tiled_band_of_##T(                                     \
        const problem *args, const segment *part, long rows, long first, long last) {            \
        return tiled_block_band(args, part, form_of(T), rows, first, last);                      \
    }
EACH_TYPE(TILED_BAND)
#define TILED_ROWS_OF(T) (rows < MIN_TILED_ROWS ? 0 : tiled_band_of_##T(args, p, rows, first, last))
#else
#define TILED_ROWS_OF(T) 0
#endif

static __attribute__((noinline)) void any_band(const problem *args, const segment *p, long rows,
                                               long first, long last) {
#define TYPE(T) \
    case T: band_of_##T(args, p, TILED_ROWS_OF(T), rows, first, last); return;
    switch (p->type) {
    case F32: band(args, p, rows, first, last, F32); return;
    case BF16:
#if defined(__AMX_TILE__)
        tiled_band(args, p, rows, first, last);
#else
        band(args, p, rows, first, last, row_form_of(args->weights) == PAIRS ? PAIRED : BF16);
#endif
        return;
    EACH_TYPE(TYPE)
    }
#undef TYPE
}

#define CHUNK 256  // rows multiplied at a time: their inputs and sums stay in L2

// Returns whether the product can output silu(gate) * up in pairs of bf16.
INLINE int gates(const linear *weights) {
#if defined(__AMX_TILE__)
    const segment *p = weights->parts;
    return row_form_of(weights) == PAIRS && weights->num_parts == 1 && p->run == p->out &&
           p->out % (2 * LANES) == 0;
#endif
    (void)weights;
    return 0;
}

// Returns the number of bands of `width` panels. With `gated`, a band has `width` gate panels and
// their up panels.
INLINE long bands_of(const problem *args, const segment *p, long width) {
    return (panels_of(p) / (args->gated ? 2 : 1) + width - 1) / width;
}

// Multiplies all rows; every thread of the team calls this.
static void product_of(const problem *args, long rows, member *me) {
    const linear *weights = args->weights;
    const long chunks = (rows + CHUNK - 1) / CHUNK, halves = args->gated ? 2 : 1;
    long panels = 0, bands = 0, claimed;
    for (long i = 0; i < weights->num_parts; i++) panels += panels_of(weights->parts + i);
    const long width = (panels < 4 * WIDE * me->threads ? FULL : WIDE) / halves;
    for (long i = 0; i < weights->num_parts; i++)
        bands += bands_of(args, weights->parts + i, width);
    while ((claimed = claim(me, bands * chunks)) >= 0) {
        const long row = claimed / bands * CHUNK;
        problem here = *args;
        here.x += row * args->x_stride;
        if (args->gated) here.gated += row * args->gated_stride;
        else here.y += row * args->y_stride;
        const segment *p = weights->parts;
        long band = claimed % bands;
        for (long count; band >= (count = bands_of(args, p, width)); p++) band -= count;
        const long first = band * width, last = min_long(first + width, panels_of(p) / halves);
        any_band(&here, p, min_long(rows - row, CHUNK), first, last);
    }
}
