// y = (x * scale) W^T + bias for rows of fp32 and W of fp32 or bf16, in panels of LANES outputs:
// all columns of a panel one after another, bf16 ones in pairs (the even column in the low half).
//
// Each output is summed over the columns in their order: the bits of a row depend neither on how
// many rows share the product nor on the number of threads.

#pragma once
#include "vectors.h"

#define FEW 2       // rows that wait for memory more than they compute
#define AHEAD 1024  // bytes
#define LINE 8      // longs, so that no two threads write to one cache line

// Weights [out, in] in panels aligned to 64 bytes; an odd last column of bf16 has a pair all the same.
// `scale` [in] and `bias` [out] may be null.
typedef struct {
    const char *panels;
    const float *scale, *bias;
    long out, in;
    int half;
} linear;

// Rows follow each other by strides; y is added to, or written.
typedef struct {
    const linear *by;
    const float *x;
    float *y;
    long x_stride, y_stride, panel_bytes;
    int add;
} problem;

// Rows from `row` with panels from `panel` on. Inlined: the last three are constants.
INLINE void tile(const problem *of, long row, long panel, int half, int rows, int panels) {
    const long in = of->by->in, out = of->by->out, first = panel * LANES, stride = of->x_stride;
    const float *x = of->x + row * stride;
    const char *w = of->by->panels + panel * of->panel_bytes;
    vec sums[ROWS][WIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < panels; p++) sums[r][p] = (vec){0};
    for (long k = 0; k + 2 <= in; k += 2) {
        pairs both[WIDE];
        UNROLLED for (int p = 0; p < panels; p++) {
            const char *from = w + p * of->panel_bytes + k * LANES * (half ? 2 : 4);
            if (rows <= FEW) __builtin_prefetch(from + AHEAD);
            if (half) both[p] = *(const pairs *)from;
        }
        UNROLLED for (int i = 0; i < 2; i++) {
            vec column[WIDE];
            UNROLLED for (int p = 0; p < panels; p++) {
                const char *from = w + p * of->panel_bytes + (k + i) * LANES * 4;
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
            const char *from = w + p * of->panel_bytes + (in - 1) * LANES * (half ? 2 : 4);
            const vec column = half ? (vec)(*(const pairs *)from << 16) : *(const vec *)from;
            for (int r = 0; r < rows; r++) sums[r][p] += x[r * stride + in - 1] * column;
        }
    const float *bias = of->by->bias;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            const long column = first + p * LANES, left = out - column;
            float *to = of->y + (row + r) * of->y_stride + column;
            if (left >= LANES) {
                vec found = sums[r][p];
                if (bias) found += load(bias + column);
                if (of->add) found += load(to);
                store(to, found);
            } else  // the last panel is filled up
                for (long i = 0; i < left; i++) {
                    const float found = sums[r][p][i] + (bias ? bias[column + i] : 0.0f);
                    to[i] = of->add ? to[i] + found : found;
                }
        }
}

#define TILES(R, P) \
    for (; p + (P) <= last; p += (P)) tile(of, r, p, half, R, P);
#define PANELS(R, P)   \
    {                  \
        long p = first; \
        TILES(R, P)    \
        TILES(R, FULL) \
        TILES(R, 1)    \
    }

// All rows with the panels from `first` to before `last`, whose weights stay in a cache meanwhile.
INLINE void band(const problem *of, long rows, long first, long last, int half) {
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

// One of several threads, and how much they have taken of a loop: [threads, LINE], zero at first.
// `progress` may be null; who watches it sees that work goes on.
typedef struct {
    long threads, thread, *taken;
    int64_t *progress;
} member;

// By one thread alone: together they would wait for the number.
INLINE void advance(const member *me) {
    if (me->progress && !me->thread)
        __atomic_store_n(me->progress, *me->progress + 1, __ATOMIC_RELAXED);
}

// All rows, by every thread of the team; they wait for each other. Each takes its own bands first,
// the same at every pass, which a near cache may still hold, then what others have left.
static void product_of(const problem *of, long rows, const member *me) {
    const long panels = (of->by->out + LANES - 1) / LANES;
    const long width = panels < 4 * WIDE * me->threads ? FULL : WIDE;
    const long bands = (panels + width - 1) / width;
    for (long turn = 0; turn < me->threads; turn++) {
        const long owner = (me->thread + turn) % me->threads;
        const long begin = bands * owner / me->threads, end = bands * (owner + 1) / me->threads;
        long *taken = me->taken + owner * LINE, b;
        while ((b = begin + __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < end) {
            const long first = b * width, last = least(first + width, panels);
            if (of->by->half) band(of, rows, first, last, 1);
            else band(of, rows, first, last, 0);
            advance(me);
        }
    }
#pragma omp barrier
    advance(me);
}

INLINE problem times(const linear *by, const float *x, long x_stride, float *y, long y_stride,
                     int add) {
    const long panel_bytes = by->half ? rounded(by->in, 2) * LANES * 2 : by->in * LANES * 4;
    return (problem){by, x, y, x_stride, y_stride, panel_bytes, add};
}
