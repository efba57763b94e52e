// Recurrent layers: short convolutions, and states that are kept at block boundaries only.
//
// The output of a token is computed from the state at the last boundary and the entries of the
// tokens since, in ascending order. So its bits do not depend on the chunk that it comes in, and a
// rejected draft leaves nothing that is read later. With S the state, G_t the sum of log decays in
// the block up to t, and factors b:
//     u_t = b_t (v_t - e^G_t S^T k_t - sum_{i<t} e^(G_t - G_i) (k_i . k_t) u_i)  by the delta rule,
//     u_t = b_t v_t  by a scan,
//     o_t = e^G_t S^T q_t + sum_{i<=t} e^(G_t - G_i) (k_i . q_t) u_i
// and after the block's last token T: S = e^G_T S + sum_i e^(G_T - G_i) k_i u_i^T.

#pragma once
#include <math.h>
#include "step.h"

#define AT_ONCE 8        // tokens for which a state is read once
#define KEY_EPS 1e-6f    // of the L2 norm of queries and keys

// The rows of one sequence in a pass.
typedef struct {
    const int32_t *pages;
    long row, rows, first, block, slot;  // `block`: that of the first row
} stretch;

static stretch stretch_of(const pass *p, long b) {
    const step *s = p->step;
    const long rows = s->query_lens[b], first = s->context_lens[b] - rows;
    return (stretch){s->state_tables + b * s->state_width, p->first_rows[b], rows, first,
                     first / s->block_size, s->state_slots[b]};
}

static const layer_states *memory_of(const pass *p, long index) {
    return p->step->states_of + index;
}

// Returns the page for the state at a boundary; without its own, that of the last boundary reached.
static long page_of(const pass *p, const stretch *of, long boundary) {
    const long own = of->pages[boundary];
    return own >= 0 ? own : of->pages[(of->first + of->rows) / p->step->block_size];
}

static long tail_floats(const recurrence *l) { return (l->kernel - 1) * padded(l->channels); }

// Returns the convolution's inputs at a position of a sequence; null for zeros.
static const float *input_at(const pass *p, const recurrence *l, const layer_states *m,
                             const stretch *of, long position) {
    const long width = padded(l->channels), ring = p->step->ring;
    const long start = of->block * p->step->block_size;
    if (position < 0) return 0;
    if (position >= of->first)
        return p->fused + (of->row + position - of->first) * p->fused_stride + input_offset(l);
    if (position >= start) return m->inputs + (of->slot * ring + position % ring) * width;
    return m->tails + of->pages[of->block] * tail_floats(l) +
           (l->kernel - 1 - (start - position)) * width;
}

// Returns the keys of the block of a position, a column [keys, block_size] each.
static float *key_block(const layer_states *m, const recurrence *l, long ring, long size, long slot,
                        long position) {
    const long keys = l->key_heads * l->key_dim, block = position % ring / size;
    return m->keys + slot * ring * padded(keys) + block * keys * size;
}

// Convolves each channel of row r, and keeps the last inputs of a whole block.
static void convolve_row(const pass *p, long index, long r) {
    const recurrence *l = &p->model->layers[index].state;
    const layer_states *m = memory_of(p, index);
    const stretch of = stretch_of(p, p->sequences[r]);
    const long width = padded(l->channels), position = p->positions[r], size = p->step->block_size;
    const float *inputs[l->kernel];
    for (long k = 0; k < l->kernel; k++)
        inputs[k] = input_at(p, l, m, &of, position + k - l->kernel + 1);
    float *to = p->mixed + r * p->mixed_stride;
    for (long c = 0; c < l->channels; c += LANES) {
        vec sum = l->conv_bias ? load(l->conv_bias + c) : all(0);
        for (long k = 0; k < l->kernel; k++)
            if (inputs[k]) sum += load(l->conv + k * width + c) * load(inputs[k] + c);
        store(to + c, l->rule == CONVOLUTION ? sum : silu(sum));
    }
    const long next = (position + 1) / size;
    if ((position + 1) % size || of.pages[next] < 0) return;
    float *tail = m->tails + of.pages[next] * tail_floats(l);
    for (long k = 1; k < l->kernel; k++, tail += width) {
        if (inputs[k]) memcpy(tail, inputs[k], l->channels * 4);
        else memset(tail, 0, l->channels * 4);
    }
}

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Norms queries and keys of row r, and computes its log decays and factors.
static void prepare_row(const pass *p, const recurrence *l, long r) {
    float *row = p->mixed + r * p->mixed_stride, *decays = row + padded(l->channels);
    float *factors = decays + l->heads;
    const float *rates = p->fused + r * p->fused_stride + l->channels + l->heads * l->value_dim;
    const int delta = l->rule == DELTA;
    for (long h = 0; delta && h < 2 * l->key_heads; h++) {
        float *x = row + h * l->key_dim, by = 1 / __builtin_sqrtf(squares(x, l->key_dim) + KEY_EPS);
        if (h < l->key_heads) by *= 1 / __builtin_sqrtf(l->key_dim);
        for (long k = 0; k < l->key_dim; k++) x[k] *= by;
    }
    for (long h = 0; h < l->heads; h++) {
        float step = softplus(rates[delta ? l->heads + h : h] + l->step_bias[h]);
        if (!delta) step = fminf(fmaxf(step, l->min_step), l->max_step);
        decays[h] = l->decay[h] * step;
        factors[h] = delta ? 1 / (1 + expf(-rates[h])) : step;
    }
}

// Multiplies the state [value_dim / LANES, key_dim, LANES] by `count` columns [key_dim, count]: keys
// and then queries, or queries only. `to` is [count, width].
INLINE void read_tile(const float *state, const float *columns, long key_dim, long width,
                      const int count, float *to) {
    for (long v = 0; v < width; v += LANES, state += key_dim * LANES) {
        vec sums[2 * AT_ONCE] = {0};
        for (long i = 0; i < key_dim; i++) {
            const vec s = load(state + i * LANES);
            _Pragma("GCC unroll 16")
            for (int c = 0; c < count; c++) sums[c] += columns[i * count + c] * s;
        }
        _Pragma("GCC unroll 16")
        for (int c = 0; c < count; c++) store(to + c * width + v, sums[c]);
    }
}

static void read_state(const float *state, const float *columns, long key_dim, long width,
                       int count, float *to) {
#define COLUMNS(n) \
    case n: \
        read_tile(state, columns, key_dim, width, n, to); \
        break;
    switch (count) {
        COLUMNS(1) COLUMNS(2) COLUMNS(3) COLUMNS(4) COLUMNS(5) COLUMNS(6) COLUMNS(7) COLUMNS(8)
        COLUMNS(10) COLUMNS(12) COLUMNS(14) COLUMNS(16)
    }
#undef COLUMNS
}

// One head of a sequence while its tokens are computed. The entries of the block's tokens are keys
// [key_dim, stride], a column each, values [block_size, width] and decays [block_size].
typedef struct {
    const recurrence *of;
    const float *state;
    float *keys, *values, *decays;
    long stride, width, head, key_at, query_at, value_at;  // places in a row of `mixed`
} head_state;

// Adds what the tokens since the boundary give to row r, at place `at` of its block. `by_key` is
// S^T k, which a scan does not need, and `by_query` is S^T q.
static void finish_token(const pass *p, const head_state *h, long r, long at, const float *by_key,
                         const float *by_query) {
    const recurrence *l = h->of;
    const int delta = l->rule == DELTA;
    const long width = h->width;
    const float *row = p->mixed + r * p->mixed_stride, *rates = row + padded(l->channels);
    const float *key = row + h->key_at, *query = row + h->query_at, *value = row + h->value_at;
    const float decay = (at ? h->decays[at - 1] : 0) + rates[h->head];
    const float factor = rates[l->heads + h->head], since = exponential(all(decay))[0];
    float by_keys[h->stride], by_queries[h->stride], out[width];
    h->decays[at] = decay;
    for (long i = 0; i < l->key_dim; i++) h->keys[i * h->stride + at] = key[i];
    for (long e = 0; e <= at; e += LANES) {
        const vec decays = widened((const char *)(h->decays + e), at + 1 - e, 0);
        const vec weights = exponential(decay - decays);
        vec keys = {0}, queries = {0};
        for (long i = 0; i < l->key_dim; i++) {
            const vec column = load(h->keys + i * h->stride + e);
            keys += key[i] * column, queries += query[i] * column;
        }
        store(by_keys + e, weights * keys), store(by_queries + e, weights * queries);
    }
    for (long v = 0; v < width; v += LANES) {
        vec u = widened((const char *)(value + v), l->value_dim - v, 0), o = all(0);
        const vec skip = l->skip ? (vec)(l->skip[h->head] * u) : all(0);
        if (h->state) o = since * load(by_query + v);
        if (delta && h->state) u -= since * load(by_key + v);
        for (long e = 0; e < at; e++) {
            const vec earlier = load(h->values + e * width + v);
            if (delta) u -= by_keys[e] * earlier;
            o += by_queries[e] * earlier;
        }
        u *= factor;
        store(h->values + at * width + v, u);
        store(out + v, o + by_queries[at] * u + skip);
    }
    memcpy(p->attended + r * p->attended_stride + h->head * l->value_dim, out, l->value_dim * 4);
}

// Adds `step` entries to one vector of each row of the state. The first entry decays the state.
INLINE void add_entries(const head_state *h, long e, long v, float since, const int step,
                        float *to) {
    const long dim = h->of->key_dim, first = v * dim;
    vec values[8];
    for (int c = 0; c < step; c++) values[c] = load(h->values + (e + c) * h->width + v);
    for (long i = 0; i < dim; i++) {
        vec sum = load(to + first + i * LANES);
        if (!e) sum = h->state ? (vec)(since * load(h->state + first + i * LANES)) : all(0);
        UNROLLED
        for (int c = 0; c < step; c++) sum += h->keys[i * h->stride + e + c] * values[c];
        store(to + first + i * LANES, sum);
    }
}

// Writes the state after a whole block to `to`, which may be the state itself. Weights its keys.
static void advance_state(const head_state *h, long count, float *to) {
    const float last = h->decays[count - 1], since = exponential(all(last))[0];
    for (long e = 0; e < count; e += LANES) {
        const vec decays = widened((const char *)(h->decays + e), count - e, 0);
        const vec weights = exponential(last - decays);
        for (long i = 0; i < h->of->key_dim; i++) {
            float *column = h->keys + i * h->stride + e;
            store(column, weights * load(column));
        }
    }
    for (long v = 0; v < h->width; v += LANES)
        for (long e = 0; e < count; e += count % 8 ? 1 : 8) {
            if (count % 8) add_entries(h, e, v, since, 1, to);
            else add_entries(h, e, v, since, 8, to);
        }
}

// Computes the rows of one sequence and value head, block by block.
static void recur_head(const pass *p, long index, const stretch *of, long head) {
    const recurrence *l = &p->model->layers[index].state;
    const layer_states *m = memory_of(p, index);
    const long size = p->step->block_size, ring = p->step->ring, dim = l->key_dim;
    const long width = padded(l->value_dim), keys = l->key_heads * dim, state_floats = dim * width;
    const long group = l->heads / l->key_heads, delta = l->rule == DELTA;
    const long key_head = (l->tiled ? head % l->key_heads : head / group) * dim;
    const long key_at = (delta ? keys : l->heads * l->value_dim) + key_head;
    const long stride = rounded(size, LANES);
    float columns[dim * 2 * AT_ONCE], read[2 * AT_ONCE * width], block_keys[dim * stride];
    head_state h = {.of = l, .keys = block_keys, .width = width, .stride = stride, .head = head,
                    .key_at = key_at, .query_at = delta ? key_head : key_at + keys,
                    .value_at = (delta ? 2 * keys : 0) + head * l->value_dim};
    if (of->block) h.state = m->states + (of->pages[of->block] * l->heads + head) * state_floats;
    const float *known = key_block(m, l, ring, size, of->slot, of->first) + key_head * size;
    if (stride == size) memcpy(block_keys, known, sizeof block_keys);
    else memset(block_keys, 0, sizeof block_keys);
    for (long i = 0; stride != size && i < dim; i++)
        memcpy(block_keys + i * stride, known + i * size, size * 4);
    for (long done = 0; done < of->rows;) {
        const long position = of->first + done, at = position % size;
        const long count = min_long(size - at, of->rows - done);
        const long entries = (of->slot * l->heads + head) * ring + (position - at) % ring;
        h.values = m->values + entries * width, h.decays = m->decays + entries;
        for (long t = 0; t < count; t += AT_ONCE) {
            const long tokens = min_long(AT_ONCE, count - t), row = of->row + done + t;
            const long all_columns = tokens * (1 + delta);
            for (long c = 0; h.state && c < all_columns; c++) {
                const float *from = p->mixed + (row + c % tokens) * p->mixed_stride;
                from += delta && c < tokens ? key_at : h.query_at;
                for (long i = 0; i < dim; i++) columns[i * all_columns + c] = from[i];
            }
            if (h.state) read_state(h.state, columns, dim, width, all_columns, read);
            for (long i = 0; i < tokens; i++)
                finish_token(p, &h, row + i, at + t + i, read + i * width,
                             read + (i + delta * tokens) * width);
        }
        done += count;
        if (at + count < size) continue;
        const long page = page_of(p, of, position / size + 1);
        float *to = m->states + (page * l->heads + head) * state_floats;
        advance_state(&h, size, to);
        h.state = to;
    }
}

// Gates and norms the output of row r, and stores the inputs and keys that later steps need.
static void finish_row(const pass *p, long index, long r) {
    const recurrence *l = &p->model->layers[index].state;
    const layer_states *m = memory_of(p, index);
    const stretch of = stretch_of(p, p->sequences[r]);
    const long inner = l->heads * l->value_dim, keys = l->key_heads * l->key_dim;
    const long ring = p->step->ring, size = p->step->block_size;
    const float *row = p->mixed + r * p->mixed_stride, *fused = p->fused + r * p->fused_stride;
    float *x = p->attended + r * p->attended_stride;
    if (p->positions[r] + ring >= of.first + of.rows) {
        const long place = of.slot * ring + p->positions[r] % ring;
        memcpy(m->inputs + place * padded(l->channels), fused + input_offset(l), l->channels * 4);
        float *to = key_block(m, l, ring, size, of.slot, p->positions[r]) + p->positions[r] % size;
        const float *key = row + (l->rule == DELTA ? keys : inner);
        for (long i = 0; i < keys; i++) to[i * size] = key[i];
    }
    if (l->rule == CONVOLUTION) {
        for (long k = 0; k < inner; k++) x[k] = row[k] * fused[inner + k];
        return;
    }
    const float *gate = fused + (l->rule == DELTA ? l->channels : 0);
    const long parts = l->rule == DELTA ? l->heads : l->groups, count = inner / parts;
    if (l->rule == SCAN)
        for (long k = 0; k < inner; k += LANES) store(x + k, silu(load(gate + k)) * load(x + k));
    for (long i = 0; l->norm && i < parts; i++) {
        float *part = x + i * count;
        const float *weight = l->norm + (l->rule == DELTA ? 0 : i * count);
        const float by = 1 / __builtin_sqrtf(squares(part, count) / count + l->norm_eps);
        for (long k = 0; k < count; k++) part[k] = part[k] * by * weight[k];
    }
    if (l->rule == DELTA)
        for (long k = 0; k < inner; k += LANES) store(x + k, silu(load(gate + k)) * load(x + k));
}

// Computes the output of a recurrent layer for all rows, from their projections.
static void recur(pass *p, long index) {
    const recurrence *l = &p->model->layers[index].state;
    const long inner = l->heads * l->value_dim;
    if (l->rule == CONVOLUTION)
        EACH_CLAIMED(&p->me, p->rows, r) {
            float *x = p->fused + r * p->fused_stride;
            for (long k = 0; k < inner; k++) x[2 * inner + k] *= x[k];
        }
    EACH_CLAIMED(&p->me, p->rows, r) {
        convolve_row(p, index, r);
        if (l->rule != CONVOLUTION) prepare_row(p, l, r);
    }
    const long sequences = p->num_sequences;
    if (l->rule != CONVOLUTION)
        for (long i; (i = claim(&p->me, sequences * l->heads)) >= 0;) {
            const stretch of = stretch_of(p, i / l->heads);
            recur_head(p, index, &of, i % l->heads);
        }
    EACH_CLAIMED(&p->me, p->rows, r) finish_row(p, index, r);
}
