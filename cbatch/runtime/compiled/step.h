// A decoder, its inputs in a step, and the working memory of a pass.

#pragma once
#include "experts.h"
#include "ragged.h"

// qkv gives rows [kv_heads, group + 2, dim]: the queries, K and V of each KV head. These may be
// null: `qk_weight` [group + 1, dim], or [kv_heads, group + 1, dim] if all heads of a row are
// normed together; `after_attention` and `after_forward`, norms of the outputs of attention and
// feed-forward (weights times sqrt(hidden)); `sinks` [kv_heads * group]; and `experts`. With
// experts, `gate_up` is their router, and there is no `down`. cos_sin [positions, dim / 2, 2]. A
// row sees the last `window` positions. The layer's input is kept as state number `kept`, unless
// that is negative.
typedef struct {
    linear qkv, out, gate_up, down;
    const float *qk_weight, *after_attention, *after_forward, *sinks, *cos_sin;
    const mixture *experts;
    long window, kept;
} layer;

// The input of a drafter: rows [token | state] of embeddings and hidden states. `token_norm` and
// `state_norm` are weights times sqrt(hidden), or null: no norm. `input_layer`, if it has parts,
// maps both to the first layer's input. Otherwise the first qkv reads both; the residual is then
// the state, normed if `normed_residual`. `only_kv`, rows [kv_heads, 2, dim] of the first qkv, is
// for passes without logits. With `plain_in` the first layer has no norm before its qkv; with
// `plain_out` the LM head has no norm.
typedef struct {
    linear input_layer, only_kv;
    const float *token_norm, *state_norm;
    long normed_residual, plain_in, plain_out;
} reader;

// embedding [vocab, hidden]: rows of fp32 or bf16, or panels of a block type. The LM head has
// `choices` logits. `reader` is null except for drafters. Sequences have no positions before
// `first`. `kept` is the state number of the last layer's output, for all rows; a drafter keeps
// only the rows with logits.
//
// `centred` norms subtract the mean. With `plain`, layers have no norms before their products. With
// `parallel`, both halves of a layer have the same input. With `whole_heads`, all queries of a row
// are normed as one vector, and all its keys as another. Without `gated` the feed-forward has no
// `up`, only an activation. Scores are multiplied by `scale` and become cap * tanh(score / cap);
// logits likewise with `logit_cap`. A cap of 0 has no effect. With `adds_later`, the output of half
// a layer is normed, scaled or a sum of experts before it is added.
typedef struct {
    const layer *layers;
    linear head;
    const char *embedding;
    const reader *reader;
    long num_layers, hidden, kv_heads, group, dim, inner, vocab, embedding_type, choices, first, kept;
    long centred, plain, parallel, whole_heads, gating, gated, adds_later;
    float eps, scale, cap, logit_cap, embedding_scale, residual_scale;
} decoder;

// tokens [rows]; query_lens and context_lens [sequences]; tables [sequences, table_width];
// logit_rows [num_logit_rows]: the rows that need logits; kv [layers, kv_heads, blocks] of blocks
// as in paged.h; logits [num_logit_rows, choices]. A drafter reads `states` [rows, hidden]. Kept
// states are written to hidden [rows, num_kept, hidden]. `progress` is null, or counted up at least
// once per layer.
//
// `partial` is null if this is the only rank: then a call runs the whole pass. Otherwise a call
// runs part `part` of the pass, and writes this rank's sums to partial [rows, hidden]. The next
// call gets the `sums` of all ranks. After the last layer's attention, only the `logit_rows`
// are left.
typedef struct {
    const int64_t *tokens, *logit_rows;
    const int32_t *query_lens, *context_lens, *tables;
    char *kv;
    float *logits;
    char *memory;  // of `memory_bytes` bytes
    int64_t *progress;
    const float *states;
    float *hidden;
    long rows, sequences, table_width, num_logit_rows, blocks, block_size, kv_half;
    long threads, num_kept;
    const float *sums;
    float *partial;
    long part;
} step;

// The state of a pass, one copy for each thread. Working memory has rows of floats, a stride apart,
// and rows in the form that the next product reads. The output of half a layer is written to
// `partial`, unless that is null. While `sums_pending` is set, the residual stream lacks `sums` (of
// all ranks, or `partial` itself), normed by `after` unless that is null. `split`: this call runs
// only part `part` of the pass.
typedef struct {
    member me;
    const decoder *model;
    const step *step;
    char *converted, *gated;
    float *residual, *normed, *fused, *attended, *gate_up, *inner, *logit_residual, *logit_attended;
    float *pairs;
    float *logits, *partial, *scratches;
    const float *sums, *after;
    char *expert_memory;
    long pair_stride, hidden_stride, fused_stride, attended_stride, gate_up_stride, inner_stride;
    long converted_stride, gated_stride, scratch_size, queries, num_pieces, rows, num_logit_rows;
    long part, split, sums_pending;
    piece *pieces;
    long *positions, *sequences;
} pass;

_Static_assert(sizeof(pass) <= MAX_JOB_BYTES, "a pass is handed over whole");

#define LOOPS_OF_A_LAYER 20  // shared loops of a layer, at most
#define OTHER_LOOPS 8        // and of the rest of a pass

static int gated_by_product(const decoder *m, const layer *l) {
    return m->gating == SILU && m->gated && !l->experts && gates(&l->gate_up) &&
           row_form_of(&l->down) == PAIRS;
}

static long carve(pass *p, char *memory, long rows, long threads) {
    const decoder *m = p->model;
    const long heads = m->kv_heads * m->group * m->dim, width = heads + 2 * m->kv_heads * m->dim;
    long used = 0;
#define ROWS_OF(to, stride, width) \
    p->stride = rounded(width, LANES) + ROW_PADDING, CARVE(p->to, rows *p->stride, float)
    ROWS_OF(residual, hidden_stride, m->hidden);
    ROWS_OF(logit_residual, hidden_stride, m->hidden);
    CARVE(p->normed, max_long(rows, threads) * p->hidden_stride, float);
    ROWS_OF(fused, fused_stride, width);
    ROWS_OF(attended, attended_stride, heads);
    ROWS_OF(logit_attended, attended_stride, heads);
    long gated = 0, separate = 0, scores = 0, bytes = 0;  // kinds of layers; sizes of experts
    for (long i = 0; i < m->num_layers; i++) {
        const mixture *e = m->layers[i].experts;
        expert_job job;
        if (!e) *(gated_by_product(m, m->layers + i) ? &gated : &separate) = 1;
        else scores = e->experts + 1, bytes = carve_mixture(&job, e, rows, m->hidden, 0);
    }
    ROWS_OF(gate_up, gate_up_stride, max_long(scores, separate * (1 + m->gated) * m->inner));
    ROWS_OF(inner, inner_stride, separate * m->inner);
    CARVE(p->expert_memory, bytes, char);
    CARVE(p->partial, m->adds_later ? rows * m->hidden : 0, float);
    p->gated_stride = converted_bytes(gated * m->inner) + 4 * ROW_PADDING;
    CARVE(p->gated, rows *p->gated_stride, char);
    ROWS_OF(pairs, pair_stride, m->reader ? 2 * m->hidden : 0);
    p->queries = queries_of_piece(m->group);
    p->scratch_size = rounded(scratch_floats(p->queries, m->dim), LANES);
    CARVE(p->scratches, threads *p->scratch_size, float);
    CARVE(p->pieces, rows, piece);
    CARVE(p->positions, rows, long);
    CARVE(p->sequences, rows, long);
    const long widest = max_long(max_long(m->hidden * (m->reader ? 2 : 1), heads), m->inner);
    p->converted_stride = converted_bytes(widest) + 4 * ROW_PADDING;
    CARVE(p->converted, rows *p->converted_stride, char);
    return used;
}

// Returns the bytes that `decode` needs for this number of rows and threads; align them to 64.
long memory_bytes(const decoder *model, long rows, long threads) {
    pass p = {.model = model};
    return carve(&p, 0, rows, threads);
}

// Computes each row's sequence and position, and the pieces. Returns nonzero for an invalid step: 1
// for a token, 2 for a block, 3 for a row of `logit_rows`.
static int plan(pass *p) {
    const decoder *m = p->model;
    const step *s = p->step;
    for (long i = 0; i < s->rows; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= m->vocab) return 1;
    for (long i = 0; i < s->num_logit_rows; i++)
        if (s->logit_rows[i] < 0 || s->logit_rows[i] >= s->rows) return 3;
    const ragged of = {s->query_lens, s->context_lens, s->tables, s->rows,
                       s->sequences, s->table_width, s->blocks, s->block_size};
    if (locate(&of, p->sequences, p->positions)) return 2;
    p->num_pieces = cut(&of, m->group, p->pieces);
    return 0;
}
