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

// How scores are made: of fp32 keys; of bf16 ones, widened; of pairs of bf16, queries rounded too.
enum scoring { WHOLE, WIDENED, BY_PAIRS };

// A layer's blocks of one KV head, [blocks, block_size * 2 * dim]. In a block lie K, transposed, in
// cells of 4 bytes: [dim, block_size] of fp32, [dim / 2, block_size, 2] of bf16; then V
// [block_size, dim].
typedef struct {
    const char *blocks;
    const int32_t *table;
    long block_size, dim, window;
    enum scoring scoring;
} paged;

INLINE long kv_size(enum scoring scoring) { return scoring == WHOLE ? 4 : 2; }
INLINE long block_bytes_of(long block_size, long dim, enum scoring scoring) {
    return block_size * 2 * dim * kv_size(scoring);
}

// `rows` rows, the first at `position`, of `group` heads each; query r, g at queries + r * stride +
// g * dim, and what it attends to at out + r * out_stride + g * dim.
typedef struct {
    const float *queries;
    float *out;
    long rows, group, position, stride, out_stride;
} attending;

// Of one thread, for up to `count` queries.
typedef struct {
    float *queries, *scores, *out, *keys, *sums, *top;  // keys: cells [dim, KEYS]
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

// LANES keys after another, of a block or gathered: cells `stride` bytes apart from dimension to
// dimension, or pair to pair.
typedef struct {
    const char *at[KEYS / LANES];
    long stride;
} columns;

// K of the chunk's positions [0, to), those from `from` on in use. Blocks that do not hold whole
// groups of LANES are gathered.
static columns columns_of(const paged *kv, const scratch *s, long chunk, long from, long to) {
    const long size = kv->block_size, bytes = block_bytes_of(size, kv->dim, kv->scoring);
    const long rows = kv->dim * kv_size(kv->scoring) / 4;
    columns found = {.stride = 4 * (size % LANES ? KEYS : size)};
    for (long k = from; k < to && size % LANES; k++) {
        const long block = (chunk + k) / size, at = chunk + k - block * size;
        const char *cell = kv->blocks + kv->table[block] * bytes + at * 4;
        for (long d = 0; d < rows; d++) memcpy(s->keys + d * KEYS + k, cell + d * size * 4, 4);
    }
    for (long g = 0; g < KEYS / LANES; g++) {
        const long first = most(least(g, (to - 1) / LANES), from / LANES) * LANES;
        const long block = (chunk + first) / size, at = chunk + first - block * size;
        if (size % LANES) found.at[g] = (const char *)(s->keys + first);
        else found.at[g] = kv->blocks + kv->table[block] * bytes + at * 4;
    }
    return found;
}

// Scores of queries from `first` on with LANES * SPAN keys. Inlined: the last two are constants.
INLINE void score(const scratch *s, const columns *of, long first, long key, long dim,
                  enum scoring scoring, int queries) {
    const float *q = s->queries + first * s->width;
    const char *const *keys = of->at + key / LANES;
    vec sums[QUERIES][SPAN];
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < SPAN; v++) sums[i][v] = (vec){0};
    const long step = scoring == WHOLE ? 1 : 2;
    for (long d = 0; d < dim; d += step) {
        pairs cells[SPAN];
        UNROLLED for (int v = 0; v < SPAN; v++)
            cells[v] = *(const pairs_at *)(keys[v] + d / step * of->stride);
#if defined(__AVX512BF16__)
        if (scoring == BY_PAIRS) {
            UNROLLED for (int i = 0; i < queries; i++) {
                int32_t two;
                memcpy(&two, (const char *)(q + i * s->width) + d * 2, 4);
                const __m512bh each = (__m512bh)_mm512_set1_epi32(two);
                UNROLLED for (int v = 0; v < SPAN; v++)
                    sums[i][v] =
                        (vec)_mm512_dpbf16_ps((__m512)sums[i][v], (__m512bh)cells[v], each);
            }
            continue;
        }
#endif
        UNROLLED for (int turn = 0; turn < step; turn++) {
            vec column[SPAN];
            UNROLLED for (int v = 0; v < SPAN; v++) {
                if (scoring == WHOLE) column[v] = (vec)cells[v];
                else if (turn) column[v] = (vec)(cells[v] & 0xffff0000u);
                else column[v] = (vec)(cells[v] << 16);
            }
            UNROLLED for (int i = 0; i < queries; i++) {
                const float each = q[i * s->width + d + turn];
                UNROLLED for (int v = 0; v < SPAN; v++) sums[i][v] += each * column[v];
            }
        }
    }
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < SPAN; v++)
            store(s->scores + (first + i) * KEYS + key + v * LANES, sums[i][v]);
}

// Adds V of positions [from, to) of the chunk, weighed, to what queries from `first` on attend to:
// `wide` vectors from dimension `d` on. Inlined: the last three are constants.
INLINE void weigh(const scratch *s, const char *const *values, long first, long from, long to,
                  long d, long dim, int half, int queries, int wide) {
    const long size = half ? 2 : 4;
    float *out = s->out + first * s->width + d;
    const float *weights = s->scores + first * KEYS;
    vec sums[QUERIES][SPAN];
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < wide; v++) sums[i][v] = load(out + i * s->width + v * LANES);
    for (long key = from; key < to; key++) {
        vec value[SPAN];
        UNROLLED for (int v = 0; v < wide; v++) {
            const long at = d + v * LANES;
            value[v] = widened(values[key] + at * size, dim - at, half);
        }
        UNROLLED for (int i = 0; i < queries; i++) {
            const float each = weights[i * KEYS + key];
            UNROLLED for (int v = 0; v < wide; v++) sums[i][v] += each * value[v];
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
    for (long key = 0; key < to; key += LANES * SPAN) score(s, of, first, key, dim, scoring, Q);
#define WEIGH(Q)                                                                        \
    for (long d = 0; d < dim;) {                                                        \
        const int wide = dim - d > (SPAN - 1) * LANES ? SPAN : dim - d > LANES ? 2 : 1; \
        if (wide == SPAN) weigh(s, values, first, from, to, d, dim, half, Q, SPAN);       \
        else if (wide == 2) weigh(s, values, first, from, to, d, dim, half, Q, 2);        \
        else weigh(s, values, first, from, to, d, dim, half, Q, 1);                       \
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

INLINE void score_all(const scratch *s, const columns *of, long count, long to, long dim,
                      enum scoring scoring) {
    EACH(SCORE)
}

INLINE void weigh_all(const scratch *s, const char *const *values, long count, long from, long to,
                      long dim, int half) {
    EACH(WEIGH)
}

// Queries [count] as they are scored.
INLINE void take_queries(const attending *of, const scratch *s, long dim, enum scoring scoring) {
    for (long q = 0; q < of->rows * of->group; q++) {
        const long row = q / of->group, head = q % of->group;
        const float *from = of->queries + row * of->stride + head * dim;
        if (scoring == BY_PAIRS) narrow(from, dim, (uint16_t *)(s->queries + q * s->width));
        else memcpy(s->queries + q * s->width, from, dim * 4);
    }
}

INLINE void attend_to(const attending *of, const paged *kv, const scratch *s,
                      enum scoring scoring) {
    const long dim = kv->dim, size = kv->block_size, value_bytes = dim * kv_size(scoring);
    const long block_bytes = block_bytes_of(size, dim, scoring);
    const long count = of->rows * of->group;
    const long end = of->position + of->rows, begin = most(of->position + 1 - kv->window, 0);
    take_queries(of, s, dim, scoring);
    for (long q = 0; q < count; q++) s->top[q] = MASKED;
    memset(s->out, 0, count * s->width * 4);
    memset(s->sums, 0, count * LANES * 4);
    for (long chunk = begin / KEYS * KEYS; chunk < end; chunk += KEYS) {
        const long from = most(begin - chunk, 0), to = least(end - chunk, KEYS);
        const columns keys = columns_of(kv, s, chunk, from, to);
        const char *values[KEYS];
        for (long k = from; k < to; k++) {
            const long block = (chunk + k) / size, at = chunk + k - block * size;
            values[k] = kv->blocks + kv->table[block] * block_bytes + (size + at) * value_bytes;
        }
        score_all(s, &keys, count, to, dim, scoring);
        for (long q = 0; q < count; q++) {
            const long position = of->position + q / of->group;
            const long seen = most(position + 1 - kv->window, 0) - chunk;
            soften(s, q, most(seen, 0), least(position + 1 - chunk, KEYS), to, dim);
        }
        weigh_all(s, values, count, from, to, dim, scoring != WHOLE);
    }
    for (long q = 0; q < count; q++) {
        const long row = q / of->group, head = q % of->group;
        float *out = of->out + row * of->out_stride + head * dim;
        const float sum = total(load(s->sums + q * LANES));
        for (long d = 0; d < dim; d++) out[d] = s->out[q * s->width + d] / sum;
    }
}

static void attend(const attending *of, const paged *kv, const scratch *s) {
    switch (kv->scoring) {
    case WHOLE: attend_to(of, kv, s, WHOLE); return;
    case WIDENED: attend_to(of, kv, s, WIDENED); return;
    case BY_PAIRS: attend_to(of, kv, s, BY_PAIRS); return;
    }
}
