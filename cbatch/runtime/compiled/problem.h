// The inputs of a product, and where its sums are written.

#pragma once
#include "vectors.h"

#define FEW 2       // up to this number of rows, a product waits for memory more than it computes
#define AHEAD 2048  // bytes to prefetch ahead, into L2: L1 has few misses in flight
#include "blocks.h"

enum { F32 = 0, BF16 = 30 };  // and block types, all as ggml numbers them

// The form in which a product takes a row: fp32; cells (see blocks.h); pairs of bf16.
enum takes { FLOATS, CELLS, PAIRS };

// Outputs [out] of one type, in panels aligned to 64 bytes. With bf16 and an odd number of columns,
// the last pair is padded. Outputs come in runs of `run`, a multiple of LANES unless there is only
// one run: output o is column `first` + o / run * pitch + o % run of y.
typedef struct {
    const char *panels;
    long out, run, pitch, first;
    int type;
} segment;

// `scale` [in] and `bias` [columns of y] may be null. All parts take rows in the same form.
typedef struct {
    const segment *parts;
    const float *scale, *bias;
    long num_parts, in;
} linear;

// Consecutive rows of x and `gated` are strides in bytes apart. The result is added to y or written
// there. With a `gated`, outputs are gate | up, and silu(gate) * up is written there in bf16, not
// y.
typedef struct {
    const linear *by;
    const char *x;
    float *y;
    long x_stride, y_stride;
    int add;
    char *gated;
    long gated_stride;
} problem;

INLINE enum takes takes_of(const linear *by) {
    const int type = by->parts->type;
#if defined(__AVX512BF16__)
    if (type == BF16) return PAIRS;
#endif
    return type == F32 || type == BF16 ? FLOATS : CELLS;
}

// The largest size of a row in the form it is taken, in bytes: a multiple of 64.
INLINE long taken_bytes(long in) { return rounded(in, CELL) * 2; }
_Static_assert(sizeof(coded) <= CELL * 2, "cells take more room than pairs");
INLINE void hand_over(enum takes as, const float *x, long in, char *to) {
    if (as == CELLS) encode(x, in, (coded *)to);
    if (as == PAIRS) narrow(x, in, (uint16_t *)to);
}

INLINE long panels_of(const segment *p) { return (p->out + LANES - 1) / LANES; }
INLINE long panel_bytes(const segment *p, long in) {
    if (p->type == F32) return in * LANES * 4;
    if (p->type == BF16) return rounded(in, 2) * LANES * 2;
    return block_panel_bytes(form_of(p->type), in);
}

// Where the sums of a panel go: the column of its first output, and the number of outputs from
// there.
typedef struct {
    long column, count;
} outputs;

INLINE outputs outputs_of(const segment *p, long panel) {
    const long output = panel * LANES, run = output / p->run;
    return (outputs){p->first + run * p->pitch + (output - run * p->run), p->out - output};
}

INLINE void put(const problem *of, outputs at, long row, vec sum) {
    const float *bias = of->by->bias;
    float *to = of->y + row * of->y_stride + at.column;
    if (at.count >= LANES) {
        if (bias) sum += load(bias + at.column);
        if (of->add) sum += load(to);
        store(to, sum);
    } else  // the last panel is padded
        for (long i = 0; i < at.count; i++) {
            const float found = sum[i] + (bias ? bias[at.column + i] : 0.0f);
            to[i] = of->add ? to[i] + found : found;
        }
}

INLINE vec silu(vec x) { return x / (exponential(-x) + all(1)); }
