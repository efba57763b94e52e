// A mixture of experts: each row goes through its chosen experts (gate_up, gate, down). Their
// outputs are weighted and summed, in the order of the experts.
//
// Rows are sorted by expert, and an expert's rows share its products. The bits of a row do not
// depend on the other rows.

#pragma once
#include "product.h"

#define ROW_PADDING LANES  // padding after a row, in floats: rows then lie in different cache sets

// Points `to` at the next `count` elements of `memory`, and adds their bytes to `used`.
#define CARVE(to, count, type) \
    (to) = (type *)(memory + used), used += rounded((count) * (long)sizeof(type), 64)

// The activation of a row [gate | up]: silu(gate) * up; gelu(gate) * up in the tanh form; gate *
// sigmoid(alpha * gate) * (up + 1) of clamped inputs; a function of the caller; relu(gate)^2 * up;
// `xielu`, in dense layers only.
#define SIGMOID_EPS 1e-6f  // added to a sum of sigmoids
enum gating { SILU, GELU_TANH, CLAMPED, CALLER, RELU_SQUARED, XIELU };

// A layer's experts: gate_up [experts + shared] of one shape and type, likewise down, without
// scale. A row uses the `choices` experts with the highest router scores, weighted by a softmax
// over all scores or, with `normalized`, over the chosen ones. It also uses all `shared` experts,
// weighted by the sigmoid of the router's last output. With `sigmoid`, scores become their sigmoids;
// experts are chosen with `correction` [experts] added, unless null, and weights multiplied by
// `scale`.
typedef struct {
    const linear *gate_up, *down;
    long experts, choices, shared, normalized, gating;
    float limit, alpha;
    const float *correction;
    long sigmoid;
    float scale;
} mixture;

// gate_up [experts] of one shape and type, likewise down, without scale; x [rows, gate_up->in],
// rows x_stride floats apart; chosen and weights [rows, choices]: the number `experts` means no
// expert; gate_up_out [rows * choices, gate_up_out_stride] floats, a multiple of 16 and at least
// 16 more than gate_up's outputs; y [rows, columns]. `memory` has `experts_bytes` bytes. `parts`: 1
// computes gate_up, 2 the rest, 3 both. With CALLER, the rest reads `inner` [pairs, down->in],
// whose pairs are in the order of `gate_up_out`.
typedef struct {
    const linear *gate_up, *down;
    const float *x, *weights, *inner;
    const int64_t *chosen;
    float *gate_up_out, *y;
    char *memory;
    long experts, rows, choices, x_stride, gate_up_out_stride, columns, gating, parts, threads;
    float limit, alpha;
} expert_step;

// Consecutive sorted pairs of one expert: `rows` of them, from pair `row` on.
typedef struct {
    long expert, row, rows;
} share;

// A pair is a row and one of its experts; pairs are sorted by expert. For each pair: its row, its
// index in `chosen`, its input in the form that products read, and its output. For each row: its
// number of pairs, and their indices `places` [rows, choices]. `num_shares` is an upper bound; the
// last shares may have no rows.
typedef struct {
    member me;
    expert_step step;
    long *row_of, *choice_of, *count, *places, *starts;
    int64_t *chosen;
    share *shares;
    char *inputs;
    float *results, *weights;
    long pairs, num_shares, input_stride, result_stride;
} expert_job;

_Static_assert(sizeof(expert_job) <= MAX_JOB_BYTES, "experts are handed over whole");

static long input_bytes(const linear *weights) {
    const long in = weights->in;
    const long bytes = row_form_of(weights) == FLOATS ? in * 4 : converted_bytes(in);
    return rounded(bytes, 64) + 4 * ROW_PADDING;
}

static long carve_experts(expert_job *p) {
    const expert_step *s = &p->step;
    const long pairs = s->rows * s->choices;
    char *memory = s->memory;
    long used = 0;
    CARVE(p->row_of, pairs, long);
    CARVE(p->choice_of, pairs, long);
    CARVE(p->places, pairs, long);
    CARVE(p->count, s->rows, long);
    CARVE(p->starts, s->experts + 1, long);
    p->pairs = pairs, p->num_shares = min_long(s->experts, pairs) + pairs / CHUNK;
    CARVE(p->shares, p->num_shares, share);
    p->input_stride = max_long(input_bytes(s->gate_up), input_bytes(s->down));
    CARVE(p->inputs, pairs * p->input_stride, char);
    p->result_stride = rounded(s->columns, LANES) + ROW_PADDING;
    CARVE(p->results, pairs * p->result_stride, float);
    return used;
}

// Sorts pairs by expert and lists each row's pairs in that order. Returns the number of pairs, or
// -1 if an entry of `chosen` is invalid.
static long sort_pairs(const expert_job *p) {
    const expert_step *s = &p->step;
    const long num_chosen = s->rows * s->choices;
    memset(p->starts, 0, (s->experts + 1) * sizeof *p->starts);
    memset(p->count, 0, s->rows * sizeof *p->count);
    for (long i = 0; i < num_chosen; i++) {
        if (s->chosen[i] < 0 || s->chosen[i] > s->experts) return -1;
        if (s->chosen[i] < s->experts) p->starts[s->chosen[i] + 1]++;
    }
    long shares = 0;
    for (long e = 0; e < s->experts; e++) {
        const long first = p->starts[e], end = first + p->starts[e + 1];
        p->starts[e + 1] = end;
        for (long row = first; row < end; row += CHUNK)
            p->shares[shares++] = (share){e, row, min_long(CHUNK, end - row)};
    }
    while (shares < p->num_shares) p->shares[shares++].rows = 0;
    const long pairs = p->starts[s->experts];
    for (long i = 0; i < num_chosen; i++)
        if (s->chosen[i] < s->experts) {
            const long at = p->starts[s->chosen[i]]++;
            p->row_of[at] = i / s->choices, p->choice_of[at] = i;
        }
    for (long at = 0; at < pairs; at++) {
        const long row = p->row_of[at];
        p->places[row * s->choices + p->count[row]++] = at;
    }
    return pairs;
}

// Multiplies the rows of each share by its expert's weights, in one loop for all shares.
static void multiply_shares(expert_job *p, const linear *experts, float *y, long y_stride) {
    long panels = 0, bands = 0;
    for (long i = 0; i < experts->num_parts; i++) panels += panels_of(experts->parts + i);
    const long width = panels * p->num_shares < 4 * WIDE * p->me.threads ? FULL : WIDE;
    for (long i = 0; i < experts->num_parts; i++)
        bands += (panels_of(experts->parts + i) + width - 1) / width;
    for (long i; (i = claim(&p->me, bands * p->num_shares)) >= 0;) {
        const share *share = p->shares + i / bands;
        if (!share->rows) continue;
        const problem here = {.weights = experts + share->expert,
                              .x = p->inputs + share->row * p->input_stride,
                              .y = y + share->row * y_stride, .x_stride = p->input_stride,
                              .y_stride = y_stride};
        const segment *part = here.weights->parts;
        long band = i % bands;
        for (long count; band >= (count = (panels_of(part) + width - 1) / width); part++)
            band -= count;
        const long first = band * width, last = min_long(first + width, panels_of(part));
        any_band(&here, part, share->rows, first, last);
    }
}

static void convert_pair(const expert_job *p, const linear *to, const float *x, long at) {
    char *input = p->inputs + at * p->input_stride;
    if (row_form_of(to) == FLOATS) memcpy(input, x, to->in * 4);
    else convert_row(row_form_of(to), x, to->in, input);
}

INLINE vec gated(long gating, vec gate, vec up, float limit, float alpha) {
    if (gating == SILU) return silu(gate) * up;
    if (gating == RELU_SQUARED) return larger(gate, all(0)) * larger(gate, all(0)) * up;
    if (gating == GELU_TANH) {
        const vec bounded = tangent((gate * gate * gate * 0.044715f + gate) * 0.7978845608f);
        return gate * 0.5f * (bounded + 1) * up;
    }
    const vec low = all(-limit), high = all(limit);
    gate = pick(gate > high, high, gate);
    up = pick(up > high, high, pick(up < low, low, up));
    return gate / (exponential(gate * -alpha) + 1) * (up + 1);
}

static void gate_row(const expert_job *p, long at) {
    const expert_step *s = &p->step;
    float *gate = s->gate_up_out + at * s->gate_up_out_stride;
    const float *up = gate + s->down->in;
    float inner[rounded(s->down->in, LANES)];
    for (long k = 0; k < s->down->in; k += LANES)
        store(inner + k, gated(s->gating, load(gate + k), load(up + k), s->limit, s->alpha));
    convert_pair(p, s->down, inner, at);
}

static void sum_row(const expert_job *p, long row) {
    const expert_step *s = &p->step;
    float *to = s->y + row * s->columns;
    memset(to, 0, s->columns * 4);
    for (long i = 0; i < p->count[row]; i++) {
        const long at = p->places[row * s->choices + i];
        const float weight = s->weights[p->choice_of[at]];
        const float *result = p->results + at * p->result_stride;
        for (long k = 0; k < s->columns; k++) to[k] += weight * result[k];
    }
}

static void experts_all(void *job) {
    expert_job *p = job;
    const expert_step *s = &p->step;
    if (s->parts & 1) {
        EACH_CLAIMED(&p->me, p->pairs, at)
            convert_pair(p, s->gate_up, s->x + p->row_of[at] * s->x_stride, at);
        multiply_shares(p, s->gate_up, s->gate_up_out, s->gate_up_out_stride);
    }
    if (s->parts & 2) {
        EACH_CLAIMED(&p->me, p->pairs, at)
            if (s->gating == CALLER) convert_pair(p, s->down, s->inner + at * s->down->in, at);
            else gate_row(p, at);
        multiply_shares(p, s->down, p->results, p->result_stride);
        EACH_CLAIMED(&p->me, s->rows, row) sum_row(p, row);
    }
}

// Chooses a row's experts and their weights from its router scores; the first of equal scores wins.
static void route(const mixture *m, const float *scores, int64_t *chosen, float *weights) {
    const float none = -__builtin_inff();
    float remaining[m->experts], chances[m->experts], sum = m->sigmoid ? SIGMOID_EPS : 0, top = 0;
    memcpy(remaining, scores, sizeof remaining);
    for (long e = 0; m->sigmoid && e < m->experts; e++) {
        chances[e] = 1 / (exponential(all(-scores[e]))[0] + 1);
        remaining[e] = chances[e] + (m->correction ? m->correction[e] : 0);
    }
    for (long i = 0; i < m->choices; i++) {
        long best = 0;
        for (long e = 1; e < m->experts; e++)
            if (remaining[e] > remaining[best]) best = e;
        if (!i) top = scores[best];
        chosen[i] = best, remaining[best] = none;
        weights[i] = m->sigmoid ? chances[best] : exponential(all(scores[best] - top))[0];
        sum += weights[i];
    }
    for (long e = 0; e < m->experts && !m->normalized && !m->sigmoid; e++)
        if (remaining[e] > none) sum += exponential(all(remaining[e] - top))[0];
    if (m->sigmoid) sum = (m->normalized ? sum : 1) / m->scale;
    for (long i = 0; i < m->choices; i++) weights[i] /= sum;
    for (long i = m->choices; i < m->choices + m->shared; i++) {
        chosen[i] = m->experts + i - m->choices;
        weights[i] = 1 / (exponential(all(-scores[m->experts]))[0] + 1);
    }
}

// Lays out the memory of a layer's experts for `rows` rows; returns its bytes.
static long carve_mixture(expert_job *p, const mixture *m, long rows, long columns, char *memory) {
    const long choices = m->choices + m->shared;
    const long stride = rounded(2 * m->down->in, LANES) + ROW_PADDING;
    long used = 0;
    p->step = (expert_step){.gate_up = m->gate_up, .down = m->down, .gating = m->gating,
                            .experts = m->experts + m->shared, .rows = rows, .choices = choices,
                            .gate_up_out_stride = stride, .columns = columns, .parts = 3,
                            .limit = m->limit, .alpha = m->alpha};
    CARVE(p->chosen, rows * choices, int64_t);
    CARVE(p->weights, rows * choices, float);
    CARVE(p->step.gate_up_out, rows * choices * stride, float);
    p->step.chosen = p->chosen, p->step.weights = p->weights, p->step.memory = memory + used;
    return used + carve_experts(p);
}

// Computes a layer's experts from router scores, whose rows are `stride` floats apart.
static void mix(expert_job *p, const mixture *m, const float *scores, long stride) {
    const expert_step *s = &p->step;
    EACH_CLAIMED(&p->me, s->rows, r)
        route(m, scores + r * stride, p->chosen + r * s->choices, p->weights + r * s->choices);
    for (long i; (i = claim(&p->me, 1)) >= 0;) sort_pairs(p);
    experts_all(p);
}
