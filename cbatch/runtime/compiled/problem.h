// A matrix product: its weights, its input rows, and where its outputs are written.

#pragma once
#include "vectors.h"

#define FEW 2       // rows up to which a product is bound by memory bandwidth
#define AHEAD 2048  // bytes to prefetch ahead, into L2: L1 allows few outstanding misses
#include "blocks.h"

enum { F32 = 0, BF16 = 30 };  // ggml's type numbers; blocks.h has those of block types

// The form of a product's input rows: fp32; cells of 8-bit codes (see blocks.h); pairs of bf16.
enum row_form { FLOATS, CELLS, PAIRS };

// The weights of `out` outputs of one type, in panels aligned to 64 bytes. With bf16 and an odd
// number of columns, the last pair is padded. Output o is column `first` + o / run * pitch + o %
// run of y. `run` is a multiple of LANES unless there is only one run.
typedef struct {
    const char *panels;
    long out, run, pitch, first;
    int type;
} segment;

// The weights of a product. `bias` [columns of y] is added unless it is null. All parts take rows in the same form.
typedef struct {
    const segment *parts;
    const float *bias;
    long num_parts, in;
} linear;

// The arguments of a product. `x_stride` and `gated_stride` are the bytes from row to row,
// `y_stride` the floats. With `add`, the result is added to y. With `gated`, outputs are gate | up,
// and silu(gate) * up is written to `gated` in bf16, nothing to y.
typedef struct {
    const linear *weights;
    const char *x;
    float *y;
    long x_stride, y_stride;
    int add;
    char *gated;
    long gated_stride;
} problem;

INLINE enum row_form row_form_of(const linear *weights) {
    const int type = weights->parts->type;
#if defined(__AVX512BF16__)
    if (type == BF16) return PAIRS;
#endif
    return type == F32 || type == BF16 ? FLOATS : CELLS;
}

// Returns the bytes of an input row in the largest form: a multiple of 64.
INLINE long converted_bytes(long in) { return rounded(in, CELL) * 2; }
_Static_assert(sizeof(coded) <= CELL * 2, "cells need more memory than pairs");
INLINE void convert_row(enum row_form form, const float *x, long in, char *to) {
    if (form == CELLS) encode(x, in, (coded *)to);
    if (form == PAIRS) narrow(x, in, (uint16_t *)to);
}

INLINE long panels_of(const segment *p) { return (p->out + LANES - 1) / LANES; }
INLINE long panel_bytes(const segment *p, long in) {
    if (p->type == F32) return in * LANES * 4;
    if (p->type == BF16) return rounded(in, 2) * LANES * 2;
    return block_panel_bytes(form_of(p->type), in);
}

// Where a panel's sums go: the column of its first output, and the segment's outputs from there on.
typedef struct {
    long column, count;
} outputs;

INLINE outputs outputs_of(const segment *p, long panel) {
    const long output = panel * LANES, run = output / p->run;
    return (outputs){p->first + run * p->pitch + (output - run * p->run), p->out - output};
}

INLINE void write_outputs(const problem *args, outputs at, long row, vec sum) {
    const float *bias = args->weights->bias;
    float *to = args->y + row * args->y_stride + at.column;
    if (at.count >= LANES) {
        if (bias) sum += load(bias + at.column);
        if (args->add) sum += load(to);
        store(to, sum);
    } else  // the last panel is padded
        for (long i = 0; i < at.count; i++) {
            const float found = sum[i] + (bias ? bias[at.column + i] : 0.0f);
            to[i] = args->add ? to[i] + found : found;
        }
}

INLINE vec silu(vec x) { return x / (exponential(-x) + all(1)); }
