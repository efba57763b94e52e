// A decoder's whole pass over a ragged batch, by one team of threads.

#pragma once
#include "attention.h"
#include "step.h"

static float squares(const float *x, long count) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(x + i) * load(x + i);
    float found = total(sum);
    for (; i < count; i++) found += x[i] * x[i];
    return found;
}

// With room for a whole vector at its end.
static void embed_row(const decoder *m, long token, float *to) {
    const int half = m->embedding_type == BF16, whole = m->embedding_type == F32;
    const long size = half ? 2 : 4;
    if (half || whole) {
        const char *from = m->embedding + token * m->hidden * size;
        for (long k = 0; k < m->hidden; k += LANES)
            store(to + k, widened(from + k * size, m->hidden - k, half));
    } else {
        const long bytes = block_panel_bytes(form_of((int)m->embedding_type), m->hidden);
        decode_row((int)m->embedding_type, m->embedding + token / LANES * bytes, m->hidden,
                   token % LANES, to);
    }
}

static void embed(pass *p) {
    EACH_TAKEN(&p->me, p->rows, r)
        embed_row(p->model, p->step->tokens[r], p->residual + r * p->hidden_stride);
}

// A row that is ready, as the product takes it.
static void give(const pass *p, const linear *to, const float *x, long row) {
    hand_over(takes_of(to), x, to->in, p->taken + row * p->taken_stride);
}

// x / sqrt(sum(x^2) + n eps) * scale: RMSNorm, whose weight times sqrt(n) is the scale.
static void norm(const decoder *m, const float *x, const float *scale, float *to) {
    const float by = 1 / __builtin_sqrtf(squares(x, m->hidden) + m->hidden * m->eps);
    for (long k = 0; k < m->hidden; k++) to[k] = scale ? x[k] * by * scale[k] : x[k] * by;
}

static void keep(const pass *p, long kept, long row, const float *x) {
    const long hidden = p->model->hidden;
    if (kept >= 0)
        memcpy(p->step->hidden + (row * p->step->num_kept + kept) * hidden, x, hidden * 4);
}

// What comes into a product that a norm is before, or with `plain` none; and state number `kept`.
// A product that takes no floats needs what is normed no longer than it takes to give it to it.
static void normalize(pass *p, const linear *to, int plain, long kept) {
    EACH_TAKEN(&p->me, p->rows, r) {
        const float *x = p->residual + r * p->hidden_stride;
        float *normed = p->normed + (takes_of(to) == FLOATS ? r : p->me.thread) * p->hidden_stride;
        keep(p, kept, r, x);
        if (plain) memcpy(normed, x, p->model->hidden * 4);
        else norm(p->model, x, to->scale, normed);
        give(p, to, normed, r);
    }
}

// The rows of a drafter: tokens and states.
static void pair_up(pass *p, const linear *to) {
    const decoder *m = p->model;
    const reader *by = m->reader;
    const long bytes = m->hidden * 4;
    EACH_TAKEN(&p->me, p->rows, r) {
        float *residual = p->residual + r * p->hidden_stride;
        float *token = p->pairs + r * p->pair_stride, *state = token + m->hidden;
        float *embedded = p->normed + r * p->hidden_stride;
        const float *given = p->step->states + r * m->hidden;
        embed_row(m, p->step->tokens[r], embedded);
        if (by->token_norm) norm(m, embedded, by->token_norm, token);
        else memcpy(token, embedded, bytes);
        if (by->state_norm) norm(m, given, by->state_norm, state);
        else memcpy(state, given, bytes);
        memcpy(residual, by->normed_residual ? state : given, bytes);
        give(p, to, token, r);
    }
}

// Pairs of dimensions side by side, rotated (arXiv:2104.09864) and scaled.
static void rotate(const float *x, const float *by, float scale, long dim, float *restrict to) {
    for (long d = 0; d < dim; d += 2) {
        to[d] = (x[d] * by[d] - x[d + 1] * by[d + 1]) * scale;
        to[d + 1] = (x[d] * by[d + 1] + x[d + 1] * by[d]) * scale;
    }
}

// Norms, rotates and scales the heads of a row and KV head, of which `queries` are queries; its K and
// V go to place `at` of a block.
static void place(const pass *p, const layer *l, long queries, float *heads, const float *cos_sin,
                  char *block, long at) {
    const decoder *m = p->model;
    const long dim = m->dim, size = p->step->block_size, half = p->step->kv_half;
    const float scale = 1 / __builtin_sqrtf(dim);
    float rotated[dim];
    for (long g = 0; g <= queries; g++) {
        float *x = heads + g * dim;
        if (l->qk_weight) {
            const float *weight = l->qk_weight + (g < queries ? g : m->group) * dim;
            const float by = 1 / __builtin_sqrtf(squares(x, dim) / dim + m->eps);
            for (long d = 0; d < dim; d++) x[d] = x[d] * by * weight[d];
        }
        rotate(x, cos_sin, g < queries ? scale : 1, dim, rotated);
        if (g < queries) memcpy(x, rotated, dim * 4);
    }
    store_kv(rotated, heads + (queries + 1) * dim, dim, dim, size, at, block, half);
}

// By pairs where the products are, too: else bits are those of every processor.
static enum scoring scoring_of(const pass *p) {
    if (!p->step->kv_half) return WHOLE;
    if (takes_of(&p->model->layers->qkv) != PAIRS) return WIDENED;
#if defined(__AMX_TILE__)
    if (fits_tiles(p->model->dim, p->model->dim)) return BY_TILES;
#endif
    return BY_PAIRS;
}

static char *blocks_of(const pass *p, long layer, long head) {
    const step *s = p->step;
    const long dim = p->model->dim, bytes = block_bytes_of(s->block_size, dim, dim, scoring_of(p));
    return s->kv + (layer * p->model->kv_heads + head) * s->blocks * bytes;
}

static void place_all(pass *p, long index, long queries) {
    const decoder *m = p->model;
    const step *s = p->step;
    const long bytes = block_bytes_of(s->block_size, m->dim, m->dim, scoring_of(p));
    EACH_TAKEN(&p->me, p->rows, r) {
        const long position = p->positions[r], which = position / s->block_size;
        const long block = s->tables[p->sequences[r] * s->table_width + which];
        for (long head = 0; head < m->kv_heads; head++)
            place(p, m->layers + index, queries,
                  p->fused + r * p->fused_stride + head * (queries + 2) * m->dim,
                  m->cos_sin + position * m->dim, blocks_of(p, index, head) + block * bytes,
                  position - which * s->block_size);
    }
}

static void attend_all(pass *p, long index) {
    const decoder *m = p->model;
    const step *s = p->step;
    const scratch mine =
        scratch_at(p->scratches + p->me.thread * p->scratch_size, p->queries, m->dim);
    for (long i; (i = take(&p->me, p->num_pieces * m->kv_heads)) >= 0;) {
        const piece *of = p->pieces + i / m->kv_heads;
        const long head = i % m->kv_heads;
        const paged kv = {blocks_of(p, index, head), s->tables + of->sequence * s->table_width,
                          s->block_size, m->dim, m->dim, m->layers[index].window, m->first,
                          scoring_of(p)};
        const attending queries = {
            p->fused + of->row * p->fused_stride + head * (m->group + 2) * m->dim,
            p->attended + of->row * p->attended_stride + head * m->group * m->dim,
            of->rows, m->group, of->position, p->fused_stride, m->dim, p->attended_stride, 1, 0, 0};
        attend(&queries, &kv, &mine);
    }
}

// inner = silu(gate) * up of gate_up [gate | up].
static void activate(pass *p, const linear *to) {
    const long inner = p->model->inner;
    EACH_TAKEN(&p->me, p->rows, r) {
        const float *gate = p->gate_up + r * p->gate_up_stride, *up = gate + inner;
        float *found = p->inner + r * p->inner_stride;
        for (long k = 0; k < inner; k += LANES)
            store(found + k, silu(load(gate + k)) * load(up + k));
        give(p, to, found, r);
    }
}

static void look_at_wanted(pass *p) {
    p->residual = p->some_residual, p->attended = p->some_attended, p->rows = p->num_wanted;
}

// From here on each row is alone: those not wanted have had their part.
static void select_wanted(pass *p) {
    EACH_TAKEN(&p->me, p->num_wanted, i) {
        const long row = p->step->wanted[i];
        memcpy(p->some_residual + i * p->hidden_stride, p->residual + row * p->hidden_stride,
               p->hidden_stride * 4);
        memcpy(p->some_attended + i * p->attended_stride, p->attended + row * p->attended_stride,
               p->attended_stride * 4);
    }
    look_at_wanted(p);
}

static void give_attended(pass *p, const linear *to) {
    if (takes_of(to) == FLOATS) return;
    EACH_TAKEN(&p->me, p->rows, r)
        give(p, to, p->attended + r * p->attended_stride, r);
}

static void multiply(pass *p, const linear *by, const float *x, long x_stride, float *y,
                     long y_stride, int add) {
    const int floats = takes_of(by) == FLOATS;
    const problem of = {.by = by, .x = floats ? (const char *)x : p->taken, .y = y,
                        .x_stride = floats ? x_stride * 4 : p->taken_stride,
                        .y_stride = y_stride, .add = add};
    product_of(&of, p->rows, &p->me);
}

// Where the sums of `out` and `down` go.
static float *sums_of(const pass *p) { return p->partial ? p->partial : p->residual; }
static long sums_stride(const pass *p) {
    return p->partial ? p->model->hidden : p->hidden_stride;
}

// residual += what all ranks' products came to.
static void add_sums(pass *p) {
    if (!p->partial) return;
    const long hidden = p->model->hidden;
    for (long r; (r = take(&p->me, p->rows)) >= 0;) {
        float *x = p->residual + r * p->hidden_stride;
        const float *sums = p->sums + r * hidden;
        for (long k = 0; k < hidden; k++) x[k] += sums[k];
    }
}

// residual += down(silu(gate) * up) of what is normed.
static void feed_forward(pass *p, const layer *l) {
    if (gated_by_product(l)) {
        const problem up = {.by = &l->gate_up, .x = p->taken, .x_stride = p->taken_stride,
                            .gated = p->gated, .gated_stride = p->gated_stride};
        product_of(&up, p->rows, &p->me);
        const problem down = {.by = &l->down, .x = p->gated, .y = sums_of(p),
                              .x_stride = p->gated_stride, .y_stride = sums_stride(p),
                              .add = !p->partial};
        product_of(&down, p->rows, &p->me);
        return;
    }
    multiply(p, &l->gate_up, p->normed, p->hidden_stride, p->gate_up, p->gate_up_stride, 0);
    activate(p, &l->down);
    multiply(p, &l->down, p->inner, p->inner_stride, sums_of(p), sums_stride(p), !p->partial);
}

static void keep_all(pass *p) {
    EACH_TAKEN(&p->me, p->rows, r)
        keep(p, p->model->kept, r, p->residual + r * p->hidden_stride);
}

// Rows into the first layer of a drafter. Nonzero where its qkv takes pairs.
static int read_states(pass *p) {
    const reader *by = p->model->reader;
    const linear *front = by->front.num_parts ? &by->front : 0;
    const linear *kv = !p->num_wanted && by->only_kv.num_parts ? &by->only_kv : 0;
    pair_up(p, front ? front : kv ? kv : &p->model->layers->qkv);
    if (!front) return 1;
    multiply(p, front, p->pairs, p->pair_stride, p->residual, p->hidden_stride, 0);
    return 0;
}

// Queries, K and V of a layer; of a drafter of which nothing is wanted K and V alone.
static void project(pass *p, long index, int pairs) {
    const decoder *m = p->model;
    const layer *l = m->layers + index;
    const reader *by = index ? 0 : m->reader;
    const int alone = by && !p->num_wanted && by->only_kv.num_parts;
    const linear *qkv = alone ? &by->only_kv : &l->qkv;
    if (pairs) multiply(p, qkv, p->pairs, p->pair_stride, p->fused, p->fused_stride, 0);
    else {
        normalize(p, qkv, by && by->plain_in, l->kept);
        multiply(p, qkv, p->normed, p->hidden_stride, p->fused, p->fused_stride, 0);
    }
    place_all(p, index, alone ? 0 : m->group);
}

static int keeps_all(const pass *p) { return p->model->kept >= 0 && !p->model->reader; }

// What is behind the last layer; rows come as they left it.
static void finish(pass *p) {
    const decoder *m = p->model;
    if (keeps_all(p)) {
        keep_all(p);
        if (!p->num_wanted) return;
        select_wanted(p);
    }
    normalize(p, &m->head, m->reader && m->reader->plain_out, m->reader ? m->kept : -1);
    multiply(p, &m->head, p->normed, p->hidden_stride, p->logits, m->choices, 0);
}

// Up to what `out` makes of a layer. 0: nothing more is wanted.
static int first_half(pass *p, long i) {
    const decoder *m = p->model;
    const long last = m->num_layers - 1;
    int pairs = 0;
    if (i) add_sums(p);
    else if (m->reader) pairs = read_states(p);
    else embed(p);
    project(p, i, pairs);
    if (i == last && !p->num_wanted && !keeps_all(p)) return 0;
    attend_all(p, i);
    if (i == last && !keeps_all(p)) select_wanted(p);
    const linear *out = &m->layers[i].out;
    give_attended(p, out);
    multiply(p, out, p->attended, p->attended_stride, sums_of(p), sums_stride(p), !p->partial);
    return 1;
}

// From there to what `down` makes.
static void second_half(pass *p, const layer *l) {
    add_sums(p);
    normalize(p, &l->gate_up, 0, -1);
    feed_forward(p, l);
}

// The whole pass, or part of one, by each thread of the team. What a step points to may be gone
// where a thread is late, and is looked at only in what it has taken.
static void decode_all(void *job) {
    pass p = *(const pass *)job;
    const decoder *m = p.model;
    if (!p.partial) {
        for (long i = 0; i < m->num_layers; i++) {
            if (!first_half(&p, i)) return;
            second_half(&p, m->layers + i);
        }
        finish(&p);
        return;
    }
    const long layer = p.part / 2, end = 2 * m->num_layers;
    if (p.part >= end - 1 && !keeps_all(&p)) look_at_wanted(&p);
    if (p.part == end) add_sums(&p), finish(&p);
    else if (p.part % 2) second_half(&p, m->layers + layer);
    else first_half(&p, layer);
}

// Writes K and V of all rows, and the logits of those wanted; or what part of that a step says.
// Nonzero, and nothing is computed, where the step does not fit: see `plan`.
int decode(const decoder *model, const step *step) {
    pass p = {.me.progress = step->progress, .model = model, .step = step};
    p.rows = step->rows, p.num_wanted = step->num_wanted, p.logits = step->logits;
    p.partial = step->partial, p.sums = step->sums, p.part = step->part;
    carve(&p, step->memory, most(step->rows, step->num_wanted), step->threads);
    const int wrong = plan(&p);
    if (wrong) return wrong;
    together(decode_all, &p, sizeof p, step->threads,
             model->num_layers * LOOPS_OF_A_LAYER + OTHER_LOOPS);
    return 0;
}

// After it, nothing that was given to `decode` is looked at any more.
void rest(void) { wait_until_all_rest(); }
