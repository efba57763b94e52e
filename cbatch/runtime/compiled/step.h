// A decoder, its inputs in a step, and the working memory of a pass.

#pragma once
#include "experts.h"
#include "ragged.h"

// A norm: none, RMSNorm, or LayerNorm, which subtracts the mean. `weight` has weights times sqrt(n),
// or is null. Unless `keeps_rows`, a normed row is needed only until the product after the norm
// has it in another form.
enum norm_kind { NO_NORM, RMS_NORM, LAYER_NORM };
typedef struct {
    const float *weight;
    float eps;
    long kind, keeps_rows;
} norm;

// A branch of the residual stream: its output is normed by `after`, scaled, and added. Unless
// `adds_later`, its last product adds the output at once.
typedef struct {
    norm before, after;
    float scale;
    long adds_later;
} branch;

// qkv gives rows [kv_heads, (group + 1) * dim + value_dim + gates]: the queries, K and V of each KV
// head, and group * value_dim gates of the output, or none.
// `qk_weight` is [group + 1, dim] for norms of each head, or [kv_heads, group + 1, dim] if all
// queries of a row are normed as one vector, and all its keys as another. EACH_ROTATED norms heads
// after the rotation. `sinks` [kv_heads *
// group] may be null. cos_sin [positions, dim / 2, 2]. A row sees the last `window` positions.
// Scores are multiplied by `scale` and become cap * tanh(score / cap), unless `cap` is 0.
enum qk_norm { NO_QK_NORM, EACH_HEAD, ALL_HEADS, EACH_ROTATED };
typedef struct {
    branch joins;
    linear qkv, out;
    const float *qk_weight, *sinks, *cos_sin;
    long kv_heads, group, dim, value_dim, window, qk_norm, gates;
    float scale, cap, qk_eps;
} attention;

INLINE long head_width(const attention *m, long queries) {
    return (queries + 1) * m->dim + m->value_dim + m->gates;
}

// A recurrent mixer; with the rule ATTENTION there is none. The projection gives rows [gate before |
// gate after | inputs] for a CONVOLUTION, [inputs | gate | factors | rates] for DELTA, [gate | inputs
// | rates] for SCAN. The inputs of a convolution with a rule are [queries | keys | values], or for
// SCAN [values | keys | queries]. conv [kernel, padded channels], conv_bias [padded channels] or
// null; decay, step_bias and skip (or null) [heads]; norm [value_dim], or for SCAN [heads *
// value_dim], which is normed in `groups` parts, or null.
enum rule { ATTENTION, CONVOLUTION, DELTA, SCAN };
typedef struct {
    const float *conv, *conv_bias, *decay, *step_bias, *skip, *norm;
    long rule, kernel, channels, heads, key_heads, key_dim, value_dim, groups, tiled;
    float norm_eps, min_step, max_step;
} recurrence;

// A layer's memory, as in state_memory.py. A state is [value_dim / LANES, key_dim, LANES].
typedef struct {
    float *states, *tails, *inputs, *keys, *values, *decays;
} layer_states;

// down(activation(gate) * up), or without `gated` down(activation(up)). With experts, `gate_up` is
// their router, and there is no `down`. With `gates_in_product`, the product of gate and up
// computes the activation. `xielu` has the 3 factors of that activation.
typedef struct {
    branch joins;
    linear gate_up, down;
    const mixture *experts;
    const float *xielu;
    long inner, activation, gated, gates_in_product;
} feed_forward;

// A recurrent layer has only branch, first product and `out` of `mixer`.
// With `parallel`, both branches have the same input. The layer's input is kept as state number
// `kept`, unless that is negative. With `joint`, its mixer reads the input of the layer before, whose
// output waits.
typedef struct {
    attention mixer;
    recurrence state;
    feed_forward forward;
    long parallel, kept, joint;
} layer;

// The input of a draft head: rows [token | state] of embeddings and hidden states. `input_layer`,
// if it has parts, maps both to the first layer's input. Otherwise the first qkv reads both; the
// residual is then the state, normed if `normed_residual`. `only_kv`, rows [kv_heads, dim +
// value_dim] of the first qkv, is for passes without logits.
typedef struct {
    linear input_layer, only_kv;
    norm token, state;
    long normed_residual;
} pair_input;

// embedding [vocab, hidden]: rows of fp32 or bf16, or panels of a block type. The LM head has
// `choices` logits, capped by `logit_cap` unless that is 0. `pairs` is null except for draft heads.
// Sequences have no positions before `first`. `kept` is the state number of the last layer's
// output, for all rows; a draft head keeps only the rows with logits.
typedef struct {
    const layer *layers;
    linear head;
    norm head_norm;
    const char *embedding;
    const pair_input *pairs;
    long num_layers, hidden, vocab, embedding_type, choices, first, kept;
    float logit_cap, embedding_scale;
} decoder;

// tokens [rows]; query_lens and context_lens [sequences]; tables [sequences, table_width];
// logit_rows [num_logit_rows]: the rows that need logits; kv [layers]: addresses of [kv_heads,
// blocks] of blocks as in paged.h; logits [num_logit_rows, choices]. A draft head reads `states` [rows, hidden]. Kept
// states are written to hidden [rows, num_kept, hidden]. `progress` is null, or counted up at least
// once per layer.
//
// `partial` is null if this is the only rank: then a call runs the whole pass. Otherwise a call
// runs part `part` of the pass, and writes this rank's sums to partial [rows, hidden]. The next
// call gets the `sums` of all ranks. After the last layer's attention, only the `logit_rows`
// are left.
//
// With recurrent layers, state_tables [sequences, state_width] name the page of each block boundary,
// and states_of [layers] has `pages` pages and rings of `ring` tokens for `slots` slots.
typedef struct {
    const int64_t *tokens, *logit_rows;
    const int32_t *query_lens, *context_lens, *tables;
    char *const *kv;
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
    layer_states *states_of;
    const int32_t *state_tables, *state_slots;
    long state_width, pages, slots, ring;
} step;

// The state of a pass, one copy for each thread. Working memory has rows of floats, a stride apart,
// and rows in the form that the next product reads. The output of a branch that is added later is
// written to `partial`. While `sums_pending` is set, the residual stream lacks `sums` (of all
// ranks, or `partial` itself), which join it as `pending` says. `split`: this call runs only part
// `part` of the pass, and all outputs are added later.
typedef struct {
    member me;
    const decoder *model;
    const step *step;
    char *converted, *gated;
    float *residual, *normed, *fused, *attended, *gate_up, *inner, *logit_residual, *logit_attended;
    float *pairs;
    float *logits, *partial, *scratches;
    const float *sums;
    const branch *pending;
    char *expert_memory;
    long pair_stride, hidden_stride, fused_stride, attended_stride, gate_up_stride, inner_stride;
    long converted_stride, gated_stride, scratch_size, group, num_pieces, rows, num_logit_rows;
    long part, split, sums_pending;
    piece *pieces;
    long *positions, *sequences, *first_rows;
    float *mixed;  // rows of a recurrence: inputs after the convolution, log decays, factors
    long mixed_stride, num_sequences;
} pass;

_Static_assert(sizeof(pass) <= MAX_JOB_BYTES, "a pass is handed over whole");

#define LOOPS_OF_A_LAYER 24  // shared loops of a layer, at most
#define OTHER_LOOPS 8        // and of the rest of a pass

INLINE long padded(long count) { return rounded(count, 16); }

// Returns where the convolution's inputs begin in a row of the projection.
INLINE long input_offset(const recurrence *l) {
    return l->rule == DELTA ? 0 : l->heads * l->value_dim * (l->rule == CONVOLUTION ? 2 : 1);
}

INLINE long row_width(const layer *l) {
    const attention *m = &l->mixer;
    const recurrence *s = &l->state;
    const long inner = s->heads * s->value_dim;
    if (s->rule == CONVOLUTION) return 3 * inner;
    if (s->rule) return s->channels + inner + (s->rule == DELTA ? 2 : 1) * s->heads;
    return m->kv_heads * head_width(m, m->group);
}

static long carve(pass *p, char *memory, long rows, long threads) {
    const decoder *m = p->model;
    long width = 0, heads = 0, scratch = 0, adds_later = 0, used = 0;
    long gated = 0, separate = 0, inner = 0, bytes = 0;  // of feed-forwards; of experts
    long mixed = 0;
    p->group = 1;
    for (long i = 0; i < m->num_layers; i++) p->group = max_long(p->group, m->layers[i].mixer.group);
    for (long i = 0; i < m->num_layers; i++) {
        const attention *a = &m->layers[i].mixer;
        const feed_forward *f = &m->layers[i].forward;
        const recurrence *s = &m->layers[i].state;
        width = max_long(width, row_width(m->layers + i));
        heads = max_long(heads, a->kv_heads * a->group * a->value_dim + s->heads * s->value_dim);
        if (s->rule) mixed = max_long(mixed, padded(s->channels) + 2 * s->heads);
        const long dim = max_long(a->dim, a->value_dim);
        scratch = max_long(scratch, scratch_floats(queries_of_piece(p->group), dim));
        adds_later |= a->joins.adds_later | f->joins.adds_later;
        expert_job job;
        if (f->experts) {
            separate = max_long(separate, f->experts->experts + 1);
            bytes = max_long(bytes, carve_mixture(&job, f->experts, rows, m->hidden, 0));
        } else if (f->gates_in_product) gated = max_long(gated, f->inner);
        else {
            separate = max_long(separate, (1 + f->gated) * f->inner);
            inner = max_long(inner, f->inner);
        }
    }
#define ROWS_OF(to, stride, width) \
    p->stride = rounded(width, LANES) + ROW_PADDING, CARVE(p->to, rows *p->stride, float)
    ROWS_OF(residual, hidden_stride, m->hidden);
    ROWS_OF(logit_residual, hidden_stride, m->hidden);
    CARVE(p->normed, max_long(rows, threads) * p->hidden_stride, float);
    ROWS_OF(fused, fused_stride, width);
    ROWS_OF(attended, attended_stride, heads);
    ROWS_OF(logit_attended, attended_stride, heads);
    ROWS_OF(gate_up, gate_up_stride, separate);
    ROWS_OF(inner, inner_stride, inner);
    CARVE(p->expert_memory, bytes, char);
    CARVE(p->partial, adds_later ? rows * m->hidden : 0, float);
    p->gated_stride = converted_bytes(gated) + 4 * ROW_PADDING;
    CARVE(p->gated, rows *p->gated_stride, char);
    ROWS_OF(pairs, pair_stride, m->pairs ? 2 * m->hidden : 0);
    p->scratch_size = rounded(scratch, LANES);
    CARVE(p->scratches, threads *p->scratch_size, float);
    CARVE(p->pieces, rows, piece);
    CARVE(p->positions, rows, long);
    CARVE(p->sequences, rows, long);
    CARVE(p->first_rows, rows, long);
    ROWS_OF(mixed, mixed_stride, mixed);
    const long widest = max_long(max_long(m->hidden * (m->pairs ? 2 : 1), heads), inner);
    p->converted_stride = converted_bytes(widest) + 4 * ROW_PADDING;
    CARVE(p->converted, rows *p->converted_stride, char);
    return used;
}

// Returns the bytes that `decode` needs for this number of rows and threads; align them to 64.
long memory_bytes(const decoder *model, long rows, long threads) {
    pass p = {.model = model};
    return carve(&p, 0, rows, threads);
}

// Returns whether a sequence lacks a page or a slot: see `stretch` in recurrent.h.
static int lacks_state(const step *s, long b) {
    const int32_t *pages = s->state_tables + b * s->state_width;
    const long first = (s->context_lens[b] - s->query_lens[b]) / s->block_size;
    const long last = s->context_lens[b] / s->block_size, slot = s->state_slots[b];
    if (last >= s->state_width || slot < 0 || slot >= s->slots) return 1;
    for (long i = max_long(first, 1); i <= last; i++)
        if (pages[i] >= s->pages || (pages[i] < 0 && (i == first || i == last))) return 1;
    return 0;
}

// Computes each row's sequence and position, and the pieces. Returns nonzero for an invalid step: 1
// for a token, 2 for a block, 3 for a row of `logit_rows`, 4 for a page or slot of a state.
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
    p->num_pieces = cut(&of, p->group, p->pieces);
    p->num_sequences = s->sequences;
    for (long r = s->rows - 1; r >= 0; r--) p->first_rows[p->sequences[r]] = r;
    int recurrent = 0;
    for (long i = 0; i < m->num_layers; i++) recurrent |= m->layers[i].state.rule != ATTENTION;
    for (long b = 0; recurrent && b < s->sequences; b++)
        if (!s->state_tables || lacks_state(s, b)) return 4;
    return 0;
}
