// A head: a drafter that reads hidden states of the target. `ingest` adds states to its KV, and
// `draft` makes several greedy drafts in a row.

#pragma once
#include "decoder.h"
#include "greedy.h"

#define SINGLE_THREAD_CHOICES (1 << 17)  // logits below which one thread is faster than several

// A position's states are [layers, width]. `norm` [layers * width], unless null, norms them in
// groups of `normed` numbers, one layer or all; it is weights times sqrt(normed). Then `fc` maps
// them to the decoder's hidden size; without parts it is skipped. `vocabulary` [choices] has the
// token ids of the logits, or is null. With `carries_normed`, the next draft reads the last state
// normed by `carry_norm`, which may be null.
typedef struct {
    const decoder *decoder;
    linear fc;
    const float *norm, *carry_norm;
    const int64_t *vocabulary;
    long layers, width, normed, carries_normed;
} head;

// For each slot: tokens [slots, token_stride]; blocks [slots, block_stride]; of_slot [slots,
// hidden], the fused state of the last position that was read. For each block: of_block [blocks,
// hidden], the fused state of its last position.
typedef struct {
    const int64_t *tokens;
    const int32_t *blocks;
    float *of_slot, *of_block;
    long token_stride, block_stride;
} slot_table;

// The common arguments of the functions below. `step_template` supplies kv, memory for `rows`
// rows, blocks, block_size, kv_half and threads of their passes. `work` has `head_bytes` bytes.
typedef struct {
    const head *head;
    const slot_table *table;
    const step *step_template;
    char *work;
} head_call;

typedef struct {
    float *inputs, *states, *hidden, *logits;
    int64_t *tokens, *logit_rows, *active;
    int32_t *lens, *contexts, *tables;
    char *converted;
    uint8_t *finite;
    long converted_stride;
} head_work;

static long carve_work(head_work *w, char *memory, const head *h, long rows, long sequences,
                       long width) {
    const decoder *m = h->decoder;
    const long widest = max_long(h->layers * h->width, m->hidden);
    long used = 0;
    w->converted_stride = converted_bytes(widest);
    CARVE(w->inputs, rows * widest, float);
    CARVE(w->states, rows * m->hidden, float);
    CARVE(w->hidden, rows * m->hidden, float);
    CARVE(w->logits, sequences * m->choices, float);
    CARVE(w->tokens, rows, int64_t);
    CARVE(w->logit_rows, rows, int64_t);
    CARVE(w->active, rows, int64_t);
    CARVE(w->lens, rows, int32_t);
    CARVE(w->contexts, rows, int32_t);
    CARVE(w->tables, sequences * width, int32_t);
    CARVE(w->converted, rows * w->converted_stride, char);
    CARVE(w->finite, rows, uint8_t);
    return used;
}

// Returns the bytes of `work` for this number of rows and sequences, with block tables of this
// width.
long head_bytes(const head *h, long rows, long sequences, long width) {
    head_work w;
    return carve_work(&w, 0, h, rows, sequences, width);
}

typedef struct {
    member me;
    const head *head;
    head_work work;
    const float *hidden;
    float *fused;
    long rows;
} fuse_job;

// Computes x / sqrt(sum(x^2) + n eps) * scale, of n numbers.
static void norm_of(const float *x, long n, float eps, const float *scale, float *to) {
    const float by = 1 / __builtin_sqrtf(squares(x, n) + n * eps);
    for (long k = 0; k < n; k++) to[k] = scale ? x[k] * by * scale[k] : x[k] * by;
}

static void fuse_all(void *job) {
    const fuse_job f = *(const fuse_job *)job;
    member me = f.me;
    const head *h = f.head;
    const long wide = h->layers * h->width;
    const long floats = !h->fc.num_parts || row_form_of(&h->fc) == FLOATS;
    EACH_CLAIMED(&me, f.rows, r) {
        const float *x = f.hidden + r * wide;
        float *to = h->fc.num_parts ? f.work.inputs + r * wide : f.fused + r * wide;
        if (!h->norm) memcpy(to, x, wide * 4);
        for (long k = 0; h->norm && k < wide; k += h->normed)
            norm_of(x + k, h->normed, h->decoder->eps, h->norm + k, to + k);
        char *converted = f.work.converted + r * f.work.converted_stride;
        if (!floats) convert_row(row_form_of(&h->fc), to, wide, converted);
    }
    if (!h->fc.num_parts) return;
    const problem args = {.weights = &h->fc,
                          .x = floats ? (const char *)f.work.inputs : f.work.converted,
                          .y = f.fused, .x_stride = floats ? wide * 4 : f.work.converted_stride,
                        .y_stride = h->decoder->hidden};
    product_of(&args, f.rows, &me);
}

static void fuse_rows(const head_call *s, const head_work *w, const float *hidden, long rows,
                      float *fused) {
    fuse_job f = {.head = s->head, .work = *w, .hidden = hidden, .fused = fused, .rows = rows};
    run_job(fuse_all, &f, sizeof f, s->step_template->threads, 2);
}

// Computes the head's inputs `fused` [rows, hidden] from states `hidden` [rows, layers, width].
void fuse(const head_call *s, const float *hidden, long rows, float *fused) {
    head_work w;
    carve_work(&w, s->work, s->head, rows, 1, 1);
    fuse_rows(s, &w, hidden, rows, fused);
    rest();
}

static void table_of(const head_call *s, long slot, long width, int32_t *to) {
    memcpy(to, s->table->blocks + slot * s->table->block_stride, width * sizeof *to);
}

// Adds states to the head's KV. Piece i has those of positions [starts[i], starts[i] + lens[i]) of
// slots[i]; the pieces of a slot are consecutive and in order. Returns nonzero as `decode` does.
int ingest(const head_call *s, const float *hidden, const int64_t *slots, const int64_t *starts,
           const int64_t *lens, long count, long rows, long width) {
    const decoder *m = s->head->decoder;
    const slot_table *t = s->table;
    const long size = s->step_template->block_size, bytes = m->hidden * sizeof(float);
    head_work w;
    carve_work(&w, s->work, s->head, rows, count, width);
    expect_jobs(1);  // keeps threads awake between the two jobs
    fuse_rows(s, &w, hidden, rows, w.hidden);
    for (long i = 0, row = 0; i < count; i++) {
        float *last = t->of_slot + slots[i] * m->hidden;
        table_of(s, slots[i], width, w.tables + i * width);
        w.lens[i] = (int32_t)lens[i], w.contexts[i] = (int32_t)(starts[i] + lens[i]);
        for (long k = 0; k < lens[i]; k++, row++) {
            const long position = starts[i] + k;
            float *here = w.hidden + row * m->hidden;
            w.tokens[row] = t->tokens[slots[i] * t->token_stride + position];
            memcpy(w.states + row * m->hidden, k ? here - m->hidden : last, bytes);
            if ((position + 1) % size == 0)
                memcpy(t->of_block + w.tables[i * width + position / size] * m->hidden, here, bytes);
        }
        if (lens[i]) memcpy(last, w.hidden + (row - 1) * m->hidden, bytes);
    }
    step next = *s->step_template;
    next.tokens = w.tokens, next.query_lens = w.lens, next.context_lens = w.contexts;
    next.tables = w.tables;
    next.states = w.states, next.rows = rows, next.sequences = count, next.table_width = width;
    const int wrong = decode(m, &next);
    expect_jobs(0);
    rest();
    return wrong;
}

// Keeps the active sequences that need more than `depth` drafts, with their next inputs; returns
// their number.
static long keep_unfinished(const head_call *s, head_work *w, long count, long width,
                            const int64_t *depths,const uint8_t *broken, long depth) {
    const head *h = s->head;
    const long hidden = h->decoder->hidden;
    long kept = 0;
    for (long i = 0; i < count; i++) {
        const long row = w->active[i];
        if (depths[row] <= depth || broken[row]) continue;
        const float *carried = w->hidden + i * hidden;
        float *to = w->states + kept * hidden;
        if (h->carries_normed) norm_of(carried, hidden, h->decoder->eps, h->carry_norm, to);
        else memcpy(to, carried, hidden * sizeof *to);
        w->tokens[kept] = w->tokens[i], w->contexts[kept] = w->contexts[i] + 1;
        memmove(w->tables + kept * width, w->tables + i * width, width * sizeof *w->tables);
        w->active[kept++] = row;
    }
    return kept;
}

// Chooses the most likely token of each active sequence, as its next input and as a draft.
static void choose_drafts(const head_call *s, head_work *w, long count, int64_t *drafts,
                          long deepest, long depth, uint8_t *broken) {
    const head *h = s->head;
    const long choices = h->decoder->choices;
    choice_job c = {.logits = w->logits, .tokens = w->tokens, .finite = w->finite, .rows = count,
                  .vocab = choices};
    const long threads = count * choices < SINGLE_THREAD_CHOICES ? 1 : s->step_template->threads;
    run_job(choose_all, &c, sizeof c, threads, 1);
    for (long i = 0; i < count; i++) {
        if (!w->finite[i]) broken[w->active[i]] = 1;
        if (h->vocabulary) w->tokens[i] = h->vocabulary[w->tokens[i]];
        drafts[w->active[i] * deepest + depth] = w->tokens[i];
    }
}

// Drafts greedily. Sequence i, in slots[i], has known[i] tokens, all but the last in the head's KV.
// It gets depths[i] >= 1 drafts in drafts [count, deepest]. If its logits are not finite, broken[i]
// is set and depths[i] becomes the number of drafts before. Returns nonzero as `decode` does.
int draft(const head_call *s, const int64_t *slots, const int64_t *known, int64_t *depths,
          long count, long deepest, long width, int64_t *drafts, uint8_t *broken) {
    const decoder *m = s->head->decoder;
    head_work w;
    carve_work(&w, s->work, s->head, count, count, width);
    for (long i = 0; i < count; i++) {
        table_of(s, slots[i], width, w.tables + i * width);
        memcpy(w.states + i * m->hidden, s->table->of_slot + slots[i] * m->hidden, m->hidden * 4);
        w.tokens[i] = s->table->tokens[slots[i] * s->table->token_stride + known[i] - 1];
        w.contexts[i] = (int32_t)known[i], w.lens[i] = 1, w.logit_rows[i] = w.active[i] = i;
    }
    step next = *s->step_template;
    next.tokens = w.tokens, next.query_lens = w.lens, next.context_lens = w.contexts;
    next.tables = w.tables;
    next.states = w.states, next.hidden = w.hidden, next.num_kept = 1, next.logits = w.logits;
    next.logit_rows = w.logit_rows, next.table_width = width;
    int wrong = 0;
    expect_jobs(1);
    for (long depth = 0; count && !wrong; depth++) {
        next.rows = next.sequences = next.num_logit_rows = count;
        wrong = decode(m, &next);
        if (wrong) break;
        choose_drafts(s, &w, count, drafts, deepest, depth, broken);
        for (long i = 0; i < count; i++)
            if (!w.finite[i]) depths[w.active[i]] = depth;
        count = keep_unfinished(s, &w, count, width, depths, broken, depth + 1);
    }
    expect_jobs(0);
    rest();
    return wrong;
}
