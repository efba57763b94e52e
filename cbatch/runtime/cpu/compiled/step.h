// A decoder and a step of it, as they come from outside; and its working memory.

#pragma once
#include "experts.h"
#include "ragged.h"

// qkv makes rows [kv_heads, group + 2, dim]: the queries of each KV head, then its K, then its V.
// May be null: `qk_weight` [group + 1, dim], or [kv_heads, group + 1, dim] where a row's heads are
// normed together; `after_attention` and `after_forward`, norms of what each half of the layer adds
// (weights times sqrt(hidden)); `sinks` [kv_heads * group]; and `experts`, whose router `gate_up`
// then is, without a `down`. cos_sin [positions, dim / 2, 2]. A row sees the last `window` positions.
// The input of the layer is kept as state number `kept`, or not if that is below 0.
typedef struct {
    linear qkv, out, gate_up, down;
    const float *qk_weight, *after_attention, *after_forward, *sinks, *cos_sin;
    const mixture *experts;
    long window, kept;
} layer;

// How a drafter that reads states takes a row: [token | state], each normed by a weight times
// sqrt(hidden), or as it is where that is null. `front`, if it has parts, makes of both what comes
// into the first layer; else the first qkv takes both, and its residual is the state, or with
// `normed_residual` the normed one. `only_kv`, rows [kv_heads, 2, dim] of the first qkv, is for
// passes of which nothing is wanted. With `plain_in` the first layer norms nothing before its qkv,
// with `plain_out` the head takes rows as they are.
typedef struct {
    linear front, only_kv;
    const float *token_norm, *state_norm;
    long normed_residual, plain_in, plain_out;
} reader;

// embedding [vocab, hidden]: rows of fp32 or bf16, of block types panels. The head makes `choices`
// logits. `reader` is null but for drafters. Positions before `first` are in no sequence. `kept` is
// that of the last layer's output: for all rows, or for those wanted with a drafter.
//
// `centred` norms subtract the mean. With `plain`, layers have no norms before their products; with
// `parallel`, both halves of a layer have the same input; with `whole_heads`, all queries of a row are
// normed together, and all its keys. Without `gated` there is a gate and no `up`. Scores are
// multiplied by `scale` and become cap * tanh(score / cap), logits likewise with `logit_cap`, unless
// the cap is 0. With `adds_later` what a half of a layer adds is normed or scaled first, or is a sum of
// experts.
typedef struct {
    const layer *layers;
    linear head;
    const char *embedding;
    const reader *reader;
    long num_layers, hidden, kv_heads, group, dim, inner, vocab, embedding_type, choices, first, kept;
    long centred, plain, parallel, whole_heads, gating, gated, adds_later;
    float eps, scale, cap, logit_cap, embedding_scale, residual_scale;
} decoder;

// tokens [rows]; query_lens and context_lens [sequences]; tables [sequences, table_width]; wanted
// [num_wanted]: flat rows; kv [layers, kv_heads, blocks] of blocks as paged.h has them; logits
// [num_wanted, choices]. `states` [rows, hidden] are what a drafter reads. What is kept goes to hidden
// [rows, num_kept, hidden]. `progress` is null, or a number that goes up during the pass, at least
// once a layer. Where layers are split over ranks a call runs part `part` of the pass alone: what a
// product leaves that must be added up goes to partial [rows, hidden], rows that were not wanted
// being gone once the last layer has attended; the next part is given the sums. `partial` is null
// where this is the only rank, and a call the whole pass.
typedef struct {
    const int64_t *tokens, *wanted;
    const int32_t *query_lens, *context_lens, *tables;
    char *kv;
    float *logits;
    char *memory;  // of `memory_bytes`
    int64_t *progress;
    const float *states;
    float *hidden;
    long rows, sequences, table_width, num_wanted, blocks, block_size, kv_half, threads, num_kept;
    const float *sums;
    float *partial;
    long part;
} step;

// A pass as each thread sees it. Working memory: rows of floats, a stride apart, and as the next
// product takes them. `partial`, unless null, receives what half of a layer adds to the residual
// stream. While the pass `owes`, the stream still lacks `sums` (of all ranks, or `partial` itself),
// normed by `after` unless that is null. `split`: this is part `part` of a pass.
typedef struct {
    member me;
    const decoder *model;
    const step *step;
    char *taken, *gated;
    float *residual, *normed, *fused, *attended, *gate_up, *inner, *some_residual, *some_attended;
    float *pairs;
    float *logits, *partial, *scratches;
    const float *sums, *after;
    char *expert_memory;
    long pair_stride, hidden_stride, fused_stride, attended_stride, gate_up_stride, inner_stride;
    long taken_stride, gated_stride, scratch_size, queries, num_pieces, rows, num_wanted;
    long part, split, owes;
    piece *pieces;
    long *positions, *sequences;
} pass;

_Static_assert(sizeof(pass) <= MOST_JOB_BYTES, "a pass is handed over whole");

#define LOOPS_OF_A_LAYER 20
#define OTHER_LOOPS 8

static int gated_by_product(const decoder *m, const layer *l) {
    return m->gating == SILU && m->gated && !l->experts && gates(&l->gate_up) &&
           takes_of(&l->down) == PAIRS;
}

static long carve(pass *p, char *memory, long rows, long threads) {
    const decoder *m = p->model;
    const long heads = m->kv_heads * m->group * m->dim, width = heads + 2 * m->kv_heads * m->dim;
    long used = 0;
#define ROWS_OF(to, stride, width) \
    p->stride = rounded(width, LANES) + GAP, TAKE(p->to, rows *p->stride, float)
    ROWS_OF(residual, hidden_stride, m->hidden);
    ROWS_OF(some_residual, hidden_stride, m->hidden);
    TAKE(p->normed, most(rows, threads) * p->hidden_stride, float);
    ROWS_OF(fused, fused_stride, width);
    ROWS_OF(attended, attended_stride, heads);
    ROWS_OF(some_attended, attended_stride, heads);
    long gated = 0, apart = 0, scores = 0, bytes = 0;  // layers of each kind there are, and experts'
    for (long i = 0; i < m->num_layers; i++) {
        const mixture *e = m->layers[i].experts;
        expert_job job;
        if (!e) *(gated_by_product(m, m->layers + i) ? &gated : &apart) = 1;
        else scores = e->experts + 1, bytes = carve_mixture(&job, e, rows, m->hidden, 0);
    }
    ROWS_OF(gate_up, gate_up_stride, most(scores, apart * (1 + m->gated) * m->inner));
    ROWS_OF(inner, inner_stride, apart * m->inner);
    TAKE(p->expert_memory, bytes, char);
    TAKE(p->partial, m->adds_later ? rows * m->hidden : 0, float);
    p->gated_stride = taken_bytes(gated * m->inner) + 4 * GAP;
    TAKE(p->gated, rows *p->gated_stride, char);
    ROWS_OF(pairs, pair_stride, m->reader ? 2 * m->hidden : 0);
    p->queries = queries_of_piece(m->group);
    p->scratch_size = rounded(scratch_floats(p->queries, m->dim), LANES);
    TAKE(p->scratches, threads *p->scratch_size, float);
    TAKE(p->pieces, rows, piece);
    TAKE(p->positions, rows, long);
    TAKE(p->sequences, rows, long);
    const long widest = most(most(m->hidden * (m->reader ? 2 : 1), heads), m->inner);
    p->taken_stride = taken_bytes(widest) + 4 * GAP;
    TAKE(p->taken, rows *p->taken_stride, char);
    return used;
}

// Bytes that `decode` needs for so many rows, or wanted ones, and threads; aligned to 64.
long memory_bytes(const decoder *model, long rows, long threads) {
    pass p = {.model = model};
    return carve(&p, 0, rows, threads);
}

// Which row is where. Nonzero where a number of the step does not fit: 1 a token, 2 a block, 3 a
// wanted row.
static int plan(pass *p) {
    const decoder *m = p->model;
    const step *s = p->step;
    for (long i = 0; i < s->rows; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= m->vocab) return 1;
    for (long i = 0; i < s->num_wanted; i++)
        if (s->wanted[i] < 0 || s->wanted[i] >= s->rows) return 3;
    const ragged of = {s->query_lens, s->context_lens, s->tables, s->rows,
                       s->sequences, s->table_width, s->blocks, s->block_size};
    if (locate(&of, p->sequences, p->positions)) return 2;
    p->num_pieces = cut(&of, m->group, p->pieces);
    return 0;
}
