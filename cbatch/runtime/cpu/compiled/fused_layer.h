// A decoder's layer in one call, for passes whose other operations are somebody else's.

#pragma once
#include "experts.h"
#include "layer_attention.h"
#include "rows.h"

#define LOOPS_OF_A_FUSED_LAYER 11

// An RMSNorm of `width` numbers, none where that is 0.
typedef struct {
    const float *weight;
    float eps, offset;
    long width;
} row_norm;

// h = x + by * behind(out(attend(rotate(qkv(before(x)))))), y = h + by * behind_forward(down(gate_up(
// before_forward(h)))). qkv makes rows [heads | kv_heads | kv_heads] of queries, keys and values, of
// which `query` and `key` norm each head or all of a row. Without `inner`, the width of what is
// gated, the feed-forward is another's: y is h then, and before_forward(h) goes to `normed`.
typedef struct {
    linear qkv, out, gate_up, down;
    row_norm before, behind, before_forward, behind_forward, query, key;
    long hidden, inner, gating;
    float by;
} fused_layer;

// x, y and normed [rows, hidden]; cos and sin [rows, turned], `turned` 0 where nothing turns.
typedef struct {
    const float *x, *cos, *sin;
    float *y, *normed;
    char *memory;  // of `fused_bytes`
    long turned, threads;
} fused_step;

// Held whole by each thread; `of` is nowhere else before all of them rest.
typedef struct {
    layer_job at;  // begins with the member
    fused_step step;
    const fused_layer *of;
    char *taken;
    float *normed, *qkv, *attended, *gate_up, *made;
    long hidden_stride, qkv_stride, attended_stride, gate_up_stride, made_stride, taken_stride;
} fused_job;

_Static_assert(sizeof(fused_job) <= MOST_JOB_BYTES, "a layer is handed over whole");

static long carve_fused(fused_job *p, char *memory, long rows) {
    const fused_layer *l = p->of;
    const attention_layer *a = &p->at.layer;
    const long heads = a->kv_heads * a->group;
    const long attended = heads * a->value_dim;
    long used = 0;
    ROWS_OF(normed, hidden_stride, l->hidden);
    ROWS_OF(qkv, qkv_stride, (heads + a->kv_heads) * a->dim + a->kv_heads * a->value_dim);
    p->attended_stride = attended;  // as `attend_piece` has them
    TAKE(p->attended, rows * attended + LANES, float);
    ROWS_OF(gate_up, gate_up_stride, 2 * l->inner);
    ROWS_OF(made, made_stride, l->hidden);
    p->taken_stride = taken_bytes(most(most(l->hidden, attended), l->inner)) + 4 * GAP;
    TAKE(p->taken, rows *p->taken_stride, char);
    return used;
}

static void norm_by(const row_norm *by, const float *x, float *to) {
    rms_norm(x, by->weight, by->width, by->eps, by->offset, to);
}

// A row that is ready, which `x` is of, as the product takes it.
static void give_fused(const fused_job *p, const linear *to, const float *x, long row) {
    if (takes_of(to) != FLOATS) hand_over(takes_of(to), x, to->in, p->taken + row * p->taken_stride);
}

// y = x, and what comes into qkv.
static void enter_rows(fused_job *p) {
    const fused_layer *l = p->of;
    EACH_TAKEN(&p->at.me, p->at.step.rows.rows, r) {
        const float *x = p->step.x + r * l->hidden;
        float *normed = p->normed + r * p->hidden_stride;
        memcpy(p->step.y + r * l->hidden, x, l->hidden * 4);
        if (l->before.width) norm_by(&l->before, x, normed);
        else memcpy(normed, x, l->hidden * 4);
        give_fused(p, &l->qkv, normed, r);
    }
}

static void multiply_fused(fused_job *p, const linear *by, const float *x, long x_stride, float *y,
                           long y_stride, int add) {
    const int floats = takes_of(by) == FLOATS;
    const problem of = {.by = by, .x = floats ? (const char *)x : p->taken, .y = y,
                        .x_stride = floats ? x_stride * 4 : p->taken_stride,
                        .y_stride = y_stride, .add = add};
    product_of(&of, p->at.step.rows.rows, &p->at.me);
}

// Heads of a row, normed and rotated where they are.
static void turn_heads(const fused_job *p, const row_norm *by, float *heads, long count, long row) {
    const long dim = p->at.layer.dim, turned = p->step.turned;
    float normed[dim], rotated[dim];
    if (by->width > dim) norm_by(by, heads, heads);
    for (long h = 0; h < count; h++) {
        float *x = heads + h * dim;
        if (by->width == dim) norm_by(by, x, normed), memcpy(x, normed, dim * 4);
        if (!turned) continue;
        turn_head(x, p->step.cos + row * turned, p->step.sin + row * turned, turned, dim, rotated);
        memcpy(x, rotated, dim * 4);
    }
}

static void place_heads(fused_job *p) {
    const attention_layer *a = &p->at.layer;
    const long heads = a->kv_heads * a->group;
    EACH_TAKEN(&p->at.me, p->at.step.rows.rows, r) {
        float *queries = p->qkv + r * p->qkv_stride, *keys = queries + heads * a->dim;
        turn_heads(p, &p->of->query, queries, heads, r);
        turn_heads(p, &p->of->key, keys, a->kv_heads, r);
        place_row(&p->at, r);
    }
}

static void attend_fused(fused_job *p) {
    const linear *out = &p->of->out;
    const long heads = p->at.layer.kv_heads;
    for (long i; (i = take(&p->at.me, p->at.num_pieces * heads)) >= 0;)
        attend_piece(&p->at, p->at.step.pieces + i / heads, i % heads);
    if (takes_of(out) == FLOATS) return;
    EACH_TAKEN(&p->at.me, p->at.step.rows.rows, r)
        give_fused(p, out, p->attended + r * p->attended_stride, r);
}

// A product into y: added at once, or first to `made`.
static int adds_at_once(const fused_job *p, const row_norm *behind) {
    return !behind->width && p->of->by == 1;
}

static void multiply_into_y(fused_job *p, const linear *by, const float *x, long x_stride,
                            const row_norm *behind) {
    const int at_once = adds_at_once(p, behind);
    multiply_fused(p, by, x, x_stride, at_once ? p->step.y : p->made,
                   at_once ? p->of->hidden : p->made_stride, at_once);
}

static void add_made(const fused_job *p, const row_norm *behind, long row) {
    const fused_layer *l = p->of;
    float *y = p->step.y + row * l->hidden, *made = p->made + row * p->made_stride;
    if (adds_at_once(p, behind)) return;
    if (behind->width) norm_by(behind, made, made);
    for (long k = 0; k < l->hidden; k++) y[k] += l->by * made[k];
}

static void enter_forward(fused_job *p) {
    const fused_layer *l = p->of;
    EACH_TAKEN(&p->at.me, p->at.step.rows.rows, r) {
        const float *y = p->step.y + r * l->hidden;
        float *normed = l->inner ? p->normed + r * p->hidden_stride : p->step.normed + r * l->hidden;
        add_made(p, &l->behind, r);
        if (l->before_forward.width) norm_by(&l->before_forward, y, normed);
        else memcpy(normed, y, l->hidden * 4);
        if (l->inner) give_fused(p, &l->gate_up, normed, r);
    }
}

// With room for a whole vector behind a row.
static void gate_rows(fused_job *p) {
    const fused_layer *l = p->of;
    EACH_TAKEN(&p->at.me, p->at.step.rows.rows, r) {
        float *gate = p->gate_up + r * p->gate_up_stride;
        const float *up = gate + l->inner;
        long k = 0;
        for (; k + LANES <= l->inner; k += LANES)
            store(gate + k, gated(l->gating, load(gate + k), load(up + k), 0, 0));
        if (k < l->inner) {
            const vec last = gated(l->gating, load(gate + k), load(up + k), 0, 0);
            memcpy(gate + k, &last, (l->inner - k) * 4);
        }
        give_fused(p, &l->down, gate, r);
    }
}

static void fused_layer_all(void *job) {
    fused_job *p = job;
    const fused_layer *l = p->of;
    enter_rows(p);
    multiply_fused(p, &l->qkv, p->normed, p->hidden_stride, p->qkv, p->qkv_stride, 0);
    place_heads(p);
    attend_fused(p);
    multiply_into_y(p, &l->out, p->attended, p->attended_stride, &l->behind);
    enter_forward(p);
    if (!l->inner) return;
    multiply_fused(p, &l->gate_up, p->normed, p->hidden_stride, p->gate_up, p->gate_up_stride, 0);
    gate_rows(p);
    multiply_into_y(p, &l->down, p->gate_up, p->gate_up_stride, &l->behind_forward);
    if (adds_at_once(p, &l->behind_forward)) return;
    EACH_TAKEN(&p->at.me, p->at.step.rows.rows, r) add_made(p, &l->behind_forward, r);
}
