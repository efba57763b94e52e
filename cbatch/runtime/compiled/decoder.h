// A decoder's whole pass over a ragged batch, by one team of threads.

#pragma once
#include "attention.h"
#include "recurrent.h"

#define SOFTCAP_LOGITS 4096  // logits that one iteration of the softcap loop handles

// Writes a token's embedding. `to` has room for whole vectors.
static void embed_row(const embedding_table *from, long token, float *to) {
    const int half = from->type == BF16, type = (int)from->type;
    const long size = half ? 2 : 4, width = from->width;
    if (half || type == F32) {
        const char *row = from->rows + token * width * size;
        for (long k = 0; k < width; k += LANES)
            store(to + k, widened(row + k * size, width - k, half));
    } else {
        const long bytes = block_panel_bytes(form_of(type), width);
        decode_row(type, from->rows + token / LANES * bytes, width, token % LANES, to);
    }
}

// Converts an input row of the product `to` to the form that the product reads.
static void convert_input(const pass *p, const linear *to, const float *x, long row) {
    convert_row(row_form_of(to), x, to->in, p->converted + row * p->converted_stride);
}

static void embed(pass *p) {
    const float scale = p->model->embedding_scale;
    EACH_CLAIMED(&p->me, p->rows, r) {
        float *to = p->residual + r * p->hidden_stride;
        embed_row(&p->model->embedding, p->step->tokens[r], to);
        for (long k = 0; scale != 1 && k < p->model->hidden; k++) to[k] *= scale;
        if (p->model->inputs) convert_input(p, &p->model->inputs->projection, to, r);
    }
}

static float mean(const float *x, long count) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(x + i);
    float result = total(sum);
    for (; i < count; i++) result += x[i];
    return result / count;
}

// Norms a row of n floats: x / sqrt(sum(x^2) + n eps) * weight, of the centred x for LayerNorm. `to`
// may be x.
static void norm_row(const norm *by, const float *x, long n, float *to) {
    if (by->kind == NO_NORM) {
        memmove(to, x, n * 4);
        return;
    }
    const float less = by->kind == LAYER_NORM ? mean(x, n) : 0;
    if (by->kind == LAYER_NORM)
        for (long k = 0; k < n; k++) to[k] = x[k] - less;
    x = by->kind == LAYER_NORM ? to : x;
    const float factor = 1 / __builtin_sqrtf(squares(x, n) + n * by->eps);
    const float *weight = by->weight;
    for (long k = 0; k < n; k++) to[k] = weight ? x[k] * factor * weight[k] : x[k] * factor;
}

// Adds the pending sums to a row of the residual stream.
static void add_pending_sums(const pass *p, long row) {
    const long hidden = p->model->hidden;
    if (!p->sums_pending) return;
    float *x = p->residual + row * p->hidden_stride, *normed = p->partial + row * hidden;
    const float *sums = p->sums + row * hidden;
    if (p->pending->after.kind) norm_row(&p->pending->after, sums, hidden, normed), sums = normed;
    const float scale = p->pending->scale, rescale = p->pending->rescale;
    for (long k = 0; k < hidden; k++) x[k] = (x[k] + scale * sums[k]) * rescale;
}

static void save_state(const pass *p, long state, long row, const float *x) {
    const long hidden = p->model->hidden;
    if (state >= 0 && p->step->hidden)
        memcpy(p->step->hidden + (row * p->step->num_kept + state) * hidden, x, hidden * 4);
}

// Norms the residual stream for a product, and saves the stream as state `state`. With `early`,
// pending sums are added after that.
static void normalize(pass *p, const linear *to, const norm *by, long state, int early) {
    EACH_CLAIMED(&p->me, p->rows, r) {
        const float *x = p->residual + r * p->hidden_stride;
        float *normed = p->normed + (by->keeps_rows ? r : p->me.thread) * p->hidden_stride;
        if (!early) add_pending_sums(p, r);
        save_state(p, state, r, x);
        norm_row(by, x, p->model->hidden, normed);
        if (early) add_pending_sums(p, r);
        convert_input(p, to, normed, r);
    }
    p->sums_pending = 0;
}

// Builds the input rows of a draft head from tokens and states.
static void build_pairs(pass *p, const linear *to) {
    const decoder *m = p->model;
    const pair_input *by = m->pairs;
    EACH_CLAIMED(&p->me, p->rows, r) {
        float *residual = p->residual + r * p->hidden_stride;
        float *token = p->pairs + r * p->pair_stride, *state = token + m->hidden;
        float *embedded = p->normed + r * p->hidden_stride;
        const float *input = p->step->states + r * m->hidden;
        embed_row(&m->embedding, p->step->tokens[r], embedded);
        norm_row(&by->token, embedded, m->hidden, token);
        norm_row(&by->state, input, m->hidden, state);
        memcpy(residual, by->normed_residual ? state : input, m->hidden * 4);
        convert_input(p, to, token, r);
    }
}

// Rotates adjacent pairs of dimensions (arXiv:2104.09864) and scales them.
static void rotate(const float *x, const float *by, float scale, long dim, float *restrict to) {
    for (long d = 0; d < dim; d += 2) {
        to[d] = (x[d] * by[d] - x[d + 1] * by[d + 1]) * scale;
        to[d + 1] = (x[d] * by[d + 1] + x[d + 1] * by[d]) * scale;
    }
}

// Norms head number `head` of a KV head: a query, or the key after the queries.
static void norm_head(const attention *l, float *x, long head) {
    const float *weight = l->qk_weight + head * l->dim;
    const float by = 1 / __builtin_sqrtf(squares(x, l->dim) / l->dim + l->qk_eps);
    for (long d = 0; d < l->dim; d++) x[d] = x[d] * by * weight[d];
}

// Norms, rotates and scales `queries` queries and the key of a row and KV head, if it has one. Stores
// K and V at place `at` of a block.
static void rotate_and_store(const pass *p, const attention *l, long queries, float *heads,
                             const float *cos_sin, char *block, long at) {
    const long dim = l->dim, size = p->step->block_size, half = p->step->kv_half;
    float rotated[dim];
    for (long g = 0; g < queries + !l->shares_kv; g++) {
        float *x = heads + g * dim;
        const float scale = g < queries ? l->scale : 1;
        const long head = g < queries ? g : l->group;
        if (l->qk_norm == EACH_HEAD) norm_head(l, x, head);
        rotate(x, cos_sin, l->qk_norm == EACH_ROTATED ? 1 : scale, dim, rotated);
        if (l->qk_norm == EACH_ROTATED) {
            norm_head(l, rotated, head);
            for (long d = 0; d < dim; d++) rotated[d] *= scale;
        }
        if (g < queries) memcpy(x, rotated, dim * 4);
    }
    if (l->shares_kv) return;
    float *value = heads + (queries + 1) * dim;
    if (l->norms_values) {
        const float by = 1 / __builtin_sqrtf(squares(value, l->value_dim) / l->value_dim + l->qk_eps);
        for (long d = 0; d < l->value_dim; d++) value[d] *= by;
    }
    store_kv(rotated, value, dim, l->value_dim, size, at, block, half);
}

// Norms all queries of a row as one vector, and all its keys as another.
static void norm_whole(const attention *l, float *heads) {
    const long queries = l->group * l->dim, normed = queries + l->dim;
    const long width = head_width(l, l->group);
    float sums[2] = {0};
    for (long head = 0; head < l->kv_heads; head++) {
        sums[0] += squares(heads + head * width, queries);
        sums[1] += squares(heads + head * width + queries, l->dim);
    }
    const float by[2] = {1 / __builtin_sqrtf(sums[0] / (l->kv_heads * queries) + l->qk_eps),
                         1 / __builtin_sqrtf(sums[1] / (l->kv_heads * l->dim) + l->qk_eps)};
    for (long head = 0; head < l->kv_heads; head++) {
        float *x = heads + head * width;
        const float *weight = l->qk_weight + head * normed;
        for (long d = 0; d < normed; d++) x[d] = x[d] * by[d >= queries] * weight[d];
    }
}

// Returns pairs or tiles if products use pairs. Otherwise bits are the same on all processors.
static enum scoring scoring_of(const pass *p, const attention *l) {
    if (!p->step->kv_half) return AS_FP32;
    if (row_form_of(&p->model->layers->mixer.qkv) != PAIRS) return BF16_AS_FP32;
#if defined(__AMX_TILE__)
    if (fits_tiles(l->dim, l->value_dim)) return BY_TILES;
#endif
    (void)l;
    return BY_PAIRS;
}

static char *blocks_of(const pass *p, long layer, long head) {
    const step *s = p->step;
    const attention *l = &p->model->layers[layer].mixer;
    return s->kv[layer] +
           head * s->blocks * block_bytes_of(s->block_size, l->dim, l->value_dim, scoring_of(p, l));
}

static void rotate_and_store_all(pass *p, long index, long queries) {
    const attention *l = &p->model->layers[index].mixer;
    EACH_CLAIMED(&p->me, p->rows, r) {
        const step *s = p->step;
        const long bytes = block_bytes_of(s->block_size, l->dim, l->value_dim, scoring_of(p, l));
        const long position = p->positions[r], which = position / s->block_size;
        const long block = s->tables[p->sequences[r] * s->table_width + which];
        float *heads = p->fused + r * p->fused_stride;
        if (l->qk_norm == ALL_HEADS) norm_whole(l, heads);
        for (long head = 0; head < l->kv_heads; head++)
            rotate_and_store(p, l, queries, heads + head * head_width(l, queries),
                             l->cos_sin + position * l->dim,
                             blocks_of(p, index, head) + block * bytes,
                             position - which * s->block_size);
    }
}

static void attend_all(pass *p, long index) {
    const attention *l = &p->model->layers[index].mixer;
    const long width = head_width(l, l->group);
    const scratch mine =
        scratch_at(p->scratches + p->me.thread * p->scratch_size, queries_of_piece(p->group),
                   max_long(l->dim, l->value_dim));
    for (long i; (i = claim(&p->me, p->num_pieces * l->kv_heads)) >= 0;) {
        const step *s = p->step;
        const piece *piece = p->pieces + i / l->kv_heads;
        const long head = i % l->kv_heads;
        const paged kv = {blocks_of(p, index, head), s->tables + piece->sequence * s->table_width,
                          s->block_size, l->dim, l->value_dim, l->window, p->model->first,
                          scoring_of(p, l)};
        const query_rows queries = {
            p->fused + piece->row * p->fused_stride + head * width,
            p->attended + piece->row * p->attended_stride + head * l->group * l->value_dim,
            piece->rows, l->group, piece->position, p->fused_stride, l->dim, p->attended_stride, 1,
            l->cap, l->sinks ? l->sinks + head * l->group : 0};
        attend(&queries, &kv, &mine);
    }
}

// Returns xIELU (arXiv:2411.13010). Near 0, e^x - 1 - x is its Taylor polynomial.
INLINE vec xielu(vec x, const float *factors) {
    vec p = x * (1.0f / 40320) + 1.0f / 5040;
    p = p * x + 1.0f / 720;
    p = p * x + 1.0f / 120;
    p = p * x + 1.0f / 24;
    p = p * x + 1.0f / 6;
    const vec square = x * x, near = (p * x + 0.5f) * square;
    const vec below = pick(x > all(-0.5f), near, exponential(x) - 1 - x) * factors[1];
    return pick(x > all(0), square * factors[0], below) + x * factors[2];
}

static void gate_attended(pass *p, const attention *l) {
    const long width = head_width(l, l->group);
    EACH_CLAIMED(&p->me, p->rows, r)
        for (long head = 0; head < l->kv_heads; head++) {
            float *x = p->attended + r * p->attended_stride + head * l->gates;
            const float *gate = p->fused + r * p->fused_stride + (head + 1) * width - l->gates;
            for (long k = 0; k < l->gates; k += LANES) {
                const vec gated = load(x + k) / (exponential(-load(gate + k)) + 1);
                memcpy(x + k, &gated, min_long(l->gates - k, LANES) * 4);
            }
        }
}

// Computes inner = silu(gate) * up of gate_up [gate | up], or another activation. Unless null,
// `inputs` replace `up`: those of a layer, for all rows of the step.
static void activate(pass *p, const feed_forward *f, const float *inputs) {
    const linear *to = &f->down;
    EACH_CLAIMED(&p->me, p->rows, r) {
        const float *gate = p->gate_up + r * p->gate_up_stride, *up = gate + to->in;
        float *inner = p->inner + r * p->inner_stride;
        if (inputs) up = inputs + (p->selected ? p->step->logit_rows[r] : r) * p->inputs_stride;
        for (long k = 0; k < to->in; k += LANES) {
            const vec by = f->gated || inputs ? load(up + k) : all(1);
            vec x = load(gate + k);
            if (f->activation == XIELU) x = xielu(x, f->xielu) * by;
            else x = gated(f->activation, x, by, 0, 0);
            store(inner + k, x);
        }
        convert_input(p, to, inner, r);
    }
}

static void use_logit_rows(pass *p) {
    p->residual = p->logit_residual, p->attended = p->logit_attended, p->rows = p->num_logit_rows;
    p->selected = 1;
}

// Keeps only the rows that need logits: from here on, rows do not read each other.
static void select_logit_rows(pass *p) {
    EACH_CLAIMED(&p->me, p->num_logit_rows, i) {
        const long row = p->step->logit_rows[i];
        memcpy(p->logit_residual + i * p->hidden_stride, p->residual + row * p->hidden_stride,
               p->hidden_stride * 4);
        memcpy(p->logit_attended + i * p->attended_stride, p->attended + row * p->attended_stride,
               p->attended_stride * 4);
    }
    use_logit_rows(p);
}

static void convert_attended(pass *p, const linear *to) {
    if (row_form_of(to) == FLOATS) return;
    EACH_CLAIMED(&p->me, p->rows, r)
        convert_input(p, to, p->attended + r * p->attended_stride, r);
}

static void multiply(pass *p, const linear *weights, const float *x, long x_stride, float *y,
                     long y_stride) {
    const int floats = row_form_of(weights) == FLOATS;
    const problem args = {.weights = weights, .x = floats ? (const char *)x : p->converted, .y = y,
                          .x_stride = floats ? x_stride * 4 : p->converted_stride,
                          .y_stride = y_stride};
    product_of(&args, p->rows, &p->me);
}

// Multiplies by the last product of a branch. Adds the output to the residual stream, or lets it
// wait in `partial`.
static void multiply_into(pass *p, const linear *weights, const char *x, long x_stride,
                          const branch *joins) {
    const int later = p->split || joins->adds_later;
    const problem args = {.weights = weights, .x = x, .y = later ? p->partial : p->residual,
                          .x_stride = x_stride,
                          .y_stride = later ? p->model->hidden : p->hidden_stride, .add = !later};
    product_of(&args, p->rows, &p->me);
    p->sums_pending = later, p->pending = joins;
}

static void multiply_rows_into(pass *p, const linear *weights, const float *x, long stride,
                               const branch *joins) {
    if (row_form_of(weights) == FLOATS)
        multiply_into(p, weights, (const char *)x, stride * 4, joins);
    else multiply_into(p, weights, p->converted, p->converted_stride, joins);
}

// Computes the inputs of all layers for each row, from its embedding, already converted.
static void compute_inputs(pass *p) {
    const layer_inputs *of = p->model->inputs;
    const long layers = p->model->num_layers, width = of->table.width / layers;
    multiply(p, &of->projection, p->residual, p->hidden_stride, p->inputs, p->inputs_stride);
    EACH_CLAIMED(&p->me, p->rows, r) {
        float *x = p->inputs + r * p->inputs_stride;
        float *row = p->table_rows + p->me.thread * p->inputs_stride;
        embed_row(&of->table, p->step->tokens[r], row);
        for (long i = 0; i < layers; i++) norm_row(&of->by, x + i * width, width, x + i * width);
        for (long k = 0; k < of->table.width; k++) x[k] += of->scale * row[k];
    }
}

// Computes the feed-forward of the normed rows, or the output of their experts. `inputs`: see
// `activate`.
static void run_forward(pass *p, const feed_forward *f, const float *inputs) {
    if (f->gates_in_product) {
        const problem up = {.weights = &f->gate_up, .x = p->converted, .gated = p->gated,
                            .x_stride = p->converted_stride, .gated_stride = p->gated_stride};
        product_of(&up, p->rows, &p->me);
        multiply_into(p, &f->down, p->gated, p->gated_stride, &f->joins);
        return;
    }
    multiply(p, &f->gate_up, p->normed, p->hidden_stride, p->gate_up, p->gate_up_stride);
    if (f->experts) {
        expert_job job = {.me = p->me};
        carve_mixture(&job, f->experts, p->rows, p->model->hidden, p->expert_memory);
        job.step.x = p->normed, job.step.x_stride = p->hidden_stride, job.step.y = p->partial;
        mix(&job, f->experts, p->gate_up, p->gate_up_stride);
        p->me = job.me, p->sums_pending = 1, p->pending = &f->joins;
        return;
    }
    activate(p, f, inputs);
    multiply_rows_into(p, &f->down, p->inner, p->inner_stride, &f->joins);
}

static void save_all_states(pass *p) {
    EACH_CLAIMED(&p->me, p->rows, r) {
        add_pending_sums(p, r);
        save_state(p, p->model->kept, r, p->residual + r * p->hidden_stride);
    }
    p->sums_pending = 0;
}

// Computes the first layer's input from tokens and states. Returns nonzero if its qkv reads [token |
// state].
static int read_states(pass *p) {
    const pair_input *by = p->model->pairs;
    const linear *input_layer = by->input_layer.num_parts ? &by->input_layer : 0;
    const linear *kv = !p->num_logit_rows && by->only_kv.num_parts ? &by->only_kv : 0;
    build_pairs(p, input_layer ? input_layer : kv ? kv : &p->model->layers->mixer.qkv);
    if (!input_layer) return 1;
    multiply(p, input_layer, p->pairs, p->pair_stride, p->residual, p->hidden_stride);
    return 0;
}

// Computes queries, K and V of a layer, or the output of a recurrence; only K and V in a draft head's pass without logits.
static void project(pass *p, long index, int pairs) {
    const layer *l = p->model->layers + index;
    const pair_input *by = index ? 0 : p->model->pairs;
    const int kv_only = by && !p->num_logit_rows && by->only_kv.num_parts;
    const linear *qkv = kv_only ? &by->only_kv : &l->mixer.qkv;
    if (pairs) multiply(p, qkv, p->pairs, p->pair_stride, p->fused, p->fused_stride);
    else {
        normalize(p, qkv, &l->mixer.joins.before, l->kept, l->joint);
        multiply(p, qkv, p->normed, p->hidden_stride, p->fused, p->fused_stride);
    }
    if (l->state.rule) recur(p, index);
    else rotate_and_store_all(p, index, kv_only ? 0 : l->mixer.group);
}

static int saves_all_states(const pass *p) {
    return p->model->kept >= 0 && p->step->hidden && !p->model->pairs;
}

// Computes what follows the last layer: the kept output, the final norm, and the logits.
static void finish(pass *p) {
    const decoder *m = p->model;
    if (saves_all_states(p)) {
        save_all_states(p);
        if (!p->num_logit_rows) return;
        select_logit_rows(p);
    }
    normalize(p, &m->head, &m->head_norm, m->pairs ? m->kept : -1, 0);
    multiply(p, &m->head, p->normed, p->hidden_stride, p->logits, m->choices);
    if (!m->logit_cap) return;
    const long pieces = (m->choices + SOFTCAP_LOGITS - 1) / SOFTCAP_LOGITS;
    EACH_CLAIMED(&p->me, p->rows * pieces, i) {
        const long first = i % pieces * SOFTCAP_LOGITS;
        const long count = min_long(m->choices - first, SOFTCAP_LOGITS);
        softcap(p->logits + i / pieces * m->choices + first, count, m->logit_cap);
    }
}

// Runs a layer up to its output projection. Returns 0 if the rest of the pass is not needed.
static int first_half(pass *p, long i) {
    const decoder *m = p->model;
    const long last = m->num_layers - 1;
    const layer *l = m->layers + i;
    int pairs = 0;
    if (!i && m->pairs) pairs = read_states(p);
    else if (!i) embed(p);
    if (!i && m->inputs) compute_inputs(p);
    project(p, i, pairs);
    if (i == last && !p->num_logit_rows && !saves_all_states(p)) return 0;
    if (l->parallel) {
        normalize(p, &l->forward.gate_up, &l->forward.joins.before, -1, 0);
        run_forward(p, &l->forward, 0);
    }
    if (!l->state.rule) attend_all(p, i);
    if (l->mixer.gates) gate_attended(p, &l->mixer);
    if (i == last && !saves_all_states(p)) select_logit_rows(p);
    convert_attended(p, &l->mixer.out);
    multiply_rows_into(p, &l->mixer.out, p->attended, p->attended_stride, &l->mixer.joins);
    return 1;
}

// Runs the rest of the layer, up to its last product.
static void second_half(pass *p, long i) {
    const layer *l = p->model->layers + i;
    if (!l->parallel && l->forward.gate_up.num_parts) {
        normalize(p, &l->forward.gate_up, &l->forward.joins.before, -1, 0);
        run_forward(p, &l->forward, 0);
    }
    if (!l->injection.gate_up.num_parts) return;
    normalize(p, &l->injection.gate_up, &l->injection.joins.before, -1, 0);
    run_forward(p, &l->injection, p->inputs + i * l->injection.inner);
}

// Lets this thread take floats below the normal range as 0, because processors need a hundred cycles
// for one, and states that decay have many. Returns the mode before.
static unsigned long flush_subnormals(void) {
    unsigned long before = 0;
#if defined(__SSE2__)
    before = _mm_getcsr();
    _mm_setcsr((unsigned)before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1ul << 24));
#endif
    return before;
}

static void restore_mode(unsigned long mode) {
#if defined(__SSE2__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#endif
    (void)mode;
}

// Runs the whole pass or a part of it. A late thread may run after the pass, when the step's arrays
// may be freed: they are read only in claimed iterations.
static __attribute__((noinline)) void decode_parts(const void *job) {
    pass p = *(const pass *)job;
    const decoder *m = p.model;
    if (!p.split) {
        for (long i = 0; i < m->num_layers; i++) {
            if (!first_half(&p, i)) return;
            second_half(&p, i);
        }
        finish(&p);
        return;
    }
    const long layer = p.part / 2, end = 2 * m->num_layers;
    if (p.part >= end - 1 && !saves_all_states(&p)) use_logit_rows(&p);
    if (p.part == end) finish(&p);
    else if (p.part % 2) second_half(&p, layer);
    else first_half(&p, layer);
}

static void decode_all(void *job) {  // called by every thread of the team
    const unsigned long mode = flush_subnormals();
    decode_parts(job);
    restore_mode(mode);
}

// Writes K and V of all rows, and the logits of `logit_rows`; or runs one part of a pass.
// Returns nonzero, and computes nothing, if the step is invalid: see `plan`.
int decode(const decoder *model, const step *step) {
    pass p = {.me.progress = step->progress, .model = model, .step = step};
    p.rows = step->rows, p.num_logit_rows = step->num_logit_rows, p.logits = step->logits;
    carve(&p, step->memory, max_long(step->rows, step->num_logit_rows), step->threads);
    p.sums = p.partial;
    if (step->partial) {
        p.partial = step->partial, p.sums = step->sums, p.part = step->part;
        p.split = 1, p.sums_pending = step->part > 0;
        p.pending = step->part % 2 ? &model->layers[step->part / 2].mixer.joins
                                   : &model->layers[max_long(step->part / 2 - 1, 0)].forward.joins;
    }
    const int wrong = plan(&p);
    if (wrong) return wrong;
    run_job(decode_all, &p, sizeof p, step->threads,
             model->num_layers * LOOPS_OF_A_LAYER + OTHER_LOOPS);
    return 0;
}

// After this call, no thread reads arguments of an earlier `decode`.
void rest(void) { wait_until_all_idle(); }
