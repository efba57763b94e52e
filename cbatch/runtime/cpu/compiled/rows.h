// Operations on rows, each by itself: for passes whose other operations are somebody else's.

#pragma once
#include "decoder.h"

// x and y [rows, width], a row of x every `stride` floats, y dense: x / sqrt(mean(x^2) + eps) *
// (weight + offset); `weight` [width] may be null.
typedef struct {
    member me;
    const float *x, *weight;
    float *y;
    long rows, width, stride;
    float eps, offset;
} norming;

static void norm_row(const norming *p, long row) {
    const float *x = p->x + row * p->stride;
    float *y = p->y + row * p->width;
    const float by = 1 / __builtin_sqrtf(squares(x, p->width) / p->width + p->eps);
    if (!p->weight)
        for (long k = 0; k < p->width; k++) y[k] = x[k] * by;
    else
        for (long k = 0; k < p->width; k++) y[k] = x[k] * by * (p->weight[k] + p->offset);
}

static void norm_all(void *job) {
    norming *p = job;
    EACH_TAKEN(&p->me, p->rows, r) norm_row(p, r);
}

// Heads of rows, rotated by halves (arXiv:2104.09864): of x and y [rows, heads, width], of which
// dimensions [0, turned) turn. Of row r head h of x begins at r * x_row + h * x_head; y is dense. cos
// and sin [rows, turned].
typedef struct {
    const float *x;
    float *y;
    long heads, width, x_row, x_head;
} rotated;

typedef struct {
    member me;
    rotated of[2];  // queries and keys
    const float *cos, *sin;
    long rows, turned;
} rotating;

static void rotate_row(const rotated *of, const float *cos, const float *sin, long row, long turned) {
    const long half = turned / 2;
    for (long h = 0; h < of->heads; h++) {
        const float *x = of->x + row * of->x_row + h * of->x_head;
        float *restrict y = of->y + (row * of->heads + h) * of->width;
        for (long d = 0; d < half; d++) {
            y[d] = x[d] * cos[d] - x[d + half] * sin[d];
            y[d + half] = x[d + half] * cos[d + half] + x[d] * sin[d + half];
        }
        memcpy(y + turned, x + turned, (of->width - turned) * 4);
    }
}

static void rotate_all(void *job) {
    rotating *p = job;
    EACH_TAKEN(&p->me, p->rows, r)
        for (int i = 0; i < 2; i++)
            rotate_row(p->of + i, p->cos + r * p->turned, p->sin + r * p->turned, r, p->turned);
}
