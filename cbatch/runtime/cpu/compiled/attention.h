// Causal attention over paged KV: softmax(q K^T) V, chunk by chunk of KEYS positions (the online
// softmax of arXiv:1805.02867).
//
// A tile is some consecutive rows of one sequence, with the query heads of one KV head. Chunks lie
// at absolute positions, and keys that a row does not see change nothing in it, to the bit: each
// row's sums are those it would have alone.

#pragma once
#include "vectors.h"

#define KEYS 64
#define MASKED -1e30f

// A layer's blocks of one KV head, [blocks, block_size, 2 (K, V), dim].
typedef struct {
    const char *blocks;
    const int32_t *table;
    long block_size, dim, window;
    int half;
} paged;

// `rows` rows, the first at `position`, of `group` heads each; query r, g at queries + r * stride +
// g * dim, and what it attends to at out + r * out_stride + g * dim.
typedef struct {
    const float *queries;
    float *out;
    long rows, group, position, stride, out_stride;
} attending;

// Of one thread, for up to `count` queries.
typedef struct {
    float *queries, *scores, *out, *keys, *sums, *top;  // keys [dim, KEYS]
    long width;                                         // of a query, and of what it attends to
} scratch;

INLINE long scratch_width(long dim) { return rounded(dim, LANES * SPAN); }
INLINE long scratch_floats(long count, long dim) {
    const long width = scratch_width(dim);
    return count * (2 * width + KEYS + LANES) + width * KEYS + rounded(count, LANES);
}

INLINE scratch scratch_at(float *at, long count, long dim) {
    scratch s = {.width = scratch_width(dim)};
    s.queries = at, s.out = s.queries + count * s.width, s.scores = s.out + count * s.width;
    s.keys = s.scores + count * KEYS, s.sums = s.keys + s.width * KEYS;
    s.top = s.sums + count * LANES;
    return s;
}

// K of `count` positions, transposed: LANES of them at a time by turns of vectors, of 4 bytes each
// (bf16 in pairs).
INLINE void transpose(const char *const *keys, long count, long dim, float *to, int half) {
    const long step = half ? 2 * LANES : LANES, size = half ? 2 : 4;
    for (long first = 0; first < count; first += LANES)
        for (long d = 0; d < dim; d += step) {
            vec a[LANES], b[LANES];
            const long here = least(step, dim - d);
            for (int i = 0; i < LANES; i++) {
                const char *from = keys[least(first + i, count - 1)] + d * size;
                a[i] = (vec){0};
                if (here == step) a[i] = load((const float *)from);
                else memcpy(&a[i], from, here * size);
            }
            for (int turn = 1; turn < LANES; turn *= 2) {
                for (int i = 0; i < LANES / 2; i++) {
                    b[2 * i] = BY_TURNS(a[i], a[i + LANES / 2], 0);
                    b[2 * i + 1] = BY_TURNS(a[i], a[i + LANES / 2], LANES / 2);
                }
                memcpy(a, b, sizeof a);
            }
            float *column = to + d * KEYS + first;
            for (int i = 0; i < LANES; i++) {
                if (half) {
                    store(column + 2 * i * KEYS, (vec)((pairs)a[i] << 16));
                    store(column + (2 * i + 1) * KEYS, (vec)((pairs)a[i] & 0xffff0000u));
                } else
                    store(column + i * KEYS, a[i]);
            }
        }
}

// Scores of queries from `first` on with LANES * SPAN keys. Inlined: `queries` is constant.
INLINE void score(const scratch *s, long first, long key, long dim, int queries) {
    const float *q = s->queries + first * s->width, *keys = s->keys + key;
    vec sums[QUERIES][SPAN];
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < SPAN; v++) sums[i][v] = (vec){0};
    for (long d = 0; d < dim; d++) {
        vec column[SPAN];
        UNROLLED for (int v = 0; v < SPAN; v++) column[v] = load(keys + d * KEYS + v * LANES);
        UNROLLED for (int i = 0; i < queries; i++) {
            const float each = q[i * s->width + d];
            UNROLLED for (int v = 0; v < SPAN; v++) sums[i][v] += each * column[v];
        }
    }
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < SPAN; v++)
            store(s->scores + (first + i) * KEYS + key + v * LANES, sums[i][v]);
}

// Adds V of positions [from, to) of the chunk, weighed, to what queries from `first` on attend to:
// `wide` vectors from dimension `d` on. Inlined: the last three are constants.
INLINE void weigh(const scratch *s, const char *const *keys, long first, long from, long to, long d,
                  long dim, int half, int queries, int wide) {
    const long size = half ? 2 : 4;
    float *out = s->out + first * s->width + d;
    const float *weights = s->scores + first * KEYS;
    vec sums[QUERIES][SPAN];
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < wide; v++) sums[i][v] = load(out + i * s->width + v * LANES);
    for (long key = from; key < to; key++) {
        vec values[SPAN];
        UNROLLED for (int v = 0; v < wide; v++) {
            const long at = d + v * LANES;
            values[v] = widened(keys[key] + (dim + at) * size, dim - at, half);
        }
        UNROLLED for (int i = 0; i < queries; i++) {
            const float each = weights[i * KEYS + key];
            UNROLLED for (int v = 0; v < wide; v++) sums[i][v] += each * values[v];
        }
    }
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < wide; v++) store(out + i * s->width + v * LANES, sums[i][v]);
}

// Scores of the chunk's first `count` keys to weights, for a query that sees those in [from, to).
INLINE void soften(const scratch *s, long query, long from, long to, long count, long dim) {
    float *scores = s->scores + query * KEYS, *sums = s->sums + query * LANES;
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec highest = all(MASKED);
    for (long k = 0; k < count; k += LANES) {
        const ints seen = (lane + (int)k >= (int)from) & (lane + (int)k < (int)to);
        highest = larger(pick(seen, load(scores + k), all(MASKED)), highest);
    }
    float top = s->top[query];
    for (int i = 0; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
    if (top > s->top[query]) {
        const vec shrink = exponential(all(s->top[query] - top));
        float *out = s->out + query * s->width;
        for (long d = 0; d < dim; d += LANES) store(out + d, load(out + d) * shrink);
        store(sums, load(sums) * shrink);
        s->top[query] = top;
    }
    vec sum = {0};
    for (long k = 0; k < count; k += LANES) {
        const ints seen = (lane + (int)k >= (int)from) & (lane + (int)k < (int)to);
        const vec weight = pick(seen, exponential(load(scores + k) - all(top)), (vec){0});
        store(scores + k, weight);
        sum += weight;
    }
    store(sums, load(sums) + sum);
}

#define SCORE(Q) \
    for (long key = 0; key < scored; key += LANES * SPAN) score(s, first, key, dim, Q);
#define WEIGH(Q)                                                                        \
    for (long d = 0; d < dim;) {                                                        \
        const int wide = dim - d > (SPAN - 1) * LANES ? SPAN : dim - d > LANES ? 2 : 1; \
        if (wide == SPAN) weigh(s, keys, first, from, to, d, dim, half, Q, SPAN);       \
        else if (wide == 2) weigh(s, keys, first, from, to, d, dim, half, Q, 2);        \
        else weigh(s, keys, first, from, to, d, dim, half, Q, 1);                       \
        d += wide * LANES;                                                              \
    }
#define EACH(DO)                                          \
    for (long first = 0; first < count; first += QUERIES) \
        switch (least(count - first, QUERIES)) {          \
        case 1: DO(1) break;                              \
        case 2: DO(2) break;                              \
        case 3: DO(3) break;                              \
        case 4: DO(4) break;                              \
        case 5: DO(5) break;                              \
        default: DO(6)                                    \
        }

static void score_all(const scratch *s, long count, long scored, long dim) { EACH(SCORE) }

INLINE void weigh_all(const scratch *s, const char *const *keys, long count, long from, long to,
                      long dim, int half) {
    EACH(WEIGH)
}

static void attend(const attending *of, const paged *kv, const scratch *s) {
    const long dim = kv->dim, token_bytes = 2 * dim * (kv->half ? 2 : 4);
    const long count = of->rows * of->group;
    const long end = of->position + of->rows, begin = most(of->position + 1 - kv->window, 0);
    for (long q = 0; q < count; q++) {
        const long row = q / of->group, head = q % of->group;
        memcpy(s->queries + q * s->width, of->queries + row * of->stride + head * dim, dim * 4);
        s->top[q] = MASKED;
    }
    memset(s->out, 0, count * s->width * 4);
    memset(s->sums, 0, count * LANES * 4);
    for (long chunk = begin / KEYS * KEYS; chunk < end; chunk += KEYS) {
        const long from = most(begin - chunk, 0), to = least(end - chunk, KEYS);
        const char *keys[KEYS];
        for (long k = from; k < to; k++) {
            const long at = chunk + k, block = at / kv->block_size;
            const long slot = (kv->table[block] - block) * kv->block_size + at;
            keys[k] = kv->blocks + slot * token_bytes;
        }
        for (long k = 0; k < from; k++) keys[k] = keys[from];
        if (kv->half) transpose(keys, to, dim, s->keys, 1);
        else transpose(keys, to, dim, s->keys, 0);
        score_all(s, count, to, dim);
        for (long q = 0; q < count; q++) {
            const long position = of->position + q / of->group;
            const long seen = most(position + 1 - kv->window, 0) - chunk;
            soften(s, q, most(seen, 0), least(position + 1 - chunk, KEYS), to, dim);
        }
        if (kv->half) weigh_all(s, keys, count, from, to, dim, 1);
        else weigh_all(s, keys, count, from, to, dim, 0);
    }
    for (long q = 0; q < count; q++) {
        const long row = q / of->group, head = q % of->group;
        float *out = of->out + row * of->out_stride + head * dim;
        const float sum = total(load(s->sums + q * LANES));
        for (long d = 0; d < dim; d++) out[d] = s->out[q * s->width + d] / sum;
    }
}
