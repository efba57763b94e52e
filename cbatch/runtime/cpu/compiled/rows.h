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

// y may be x.
static void rms_norm(const float *x, const float *weight, long width, float eps, float offset,
                     float *y) {
    const float by = 1 / __builtin_sqrtf(squares(x, width) / width + eps);
    if (!weight)
        for (long k = 0; k < width; k++) y[k] = x[k] * by;
    else
        for (long k = 0; k < width; k++) y[k] = x[k] * by * (weight[k] + offset);
}

static void norm_row(const norming *p, long row) {
    rms_norm(p->x + row * p->stride, p->weight, p->width, p->eps, p->offset, p->y + row * p->width);
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

// A head of `width`, of which the first `turned` turn.
static void turn_head(const float *x, const float *cos, const float *sin, long turned, long width,
                      float *restrict y) {
    const long half = turned / 2;
    for (long d = 0; d < half; d++) {
        y[d] = x[d] * cos[d] - x[d + half] * sin[d];
        y[d + half] = x[d + half] * cos[d + half] + x[d] * sin[d + half];
    }
    memcpy(y + turned, x + turned, (width - turned) * 4);
}

static void rotate_row(const rotated *of, const float *cos, const float *sin, long row, long turned) {
    for (long h = 0; h < of->heads; h++)
        turn_head(of->x + row * of->x_row + h * of->x_head, cos, sin, turned, of->width,
                  of->y + (row * of->heads + h) * of->width);
}

static void rotate_all(void *job) {
    rotating *p = job;
    EACH_TAKEN(&p->me, p->rows, r)
        for (int i = 0; i < 2; i++)
            rotate_row(p->of + i, p->cos + r * p->turned, p->sin + r * p->turned, r, p->turned);
}
