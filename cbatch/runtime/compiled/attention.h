// Causal attention over paged KV: softmax(q K^T) V, in chunks of KEYS positions (the online softmax
// of arXiv:1805.02867).
//
// A tile has consecutive rows of one sequence, with the query heads of one KV head. Chunks begin at
// multiples of KEYS, and a key that a row does not see does not change its bits. So a row's bits do
// not depend on the other rows.

#pragma once
#include "tiled_attention.h"

// Writes the addresses of V for the chunk's positions [from, to): one for each position, pair or
// tile. A pair is gathered if half of it is not in use, or if blocks have no pairs.
static void values_of(const paged *kv, const scratch *s, long chunk, long from, long to,
                      const char **values) {
    const long size = kv->block_size, bytes = bytes_of_block(kv);
    const long half = kv->scoring != AS_FP32, step = half ? 2 : 1;
#if defined(__AMX_TILE__)
    if (kv->scoring == BY_TILES) {
        for (long group = from / TILE; group * TILE < to; group++)
            values[group] = value_tile(kv, s, chunk, group, from, to);
        return;
    }
#endif
    for (long k = from / step * step; k < to; k += step) {
        const long first = chunk + max_long(k, from), last = chunk + min_long(k + step, to);
        const long block = first / size, at = first - block * size;
        if (half && (size % 2 || last - first < 2))
            values[k / 2] = gathered(kv, s->values + k / 2 * s->width, first, last);
        else
            values[k / step] = kv->blocks + kv->table[block] * bytes +
                               value_place_of(at, size, kv->dim, kv->value_dim, half).first;
    }
}

// Returns fp32 cells, or the first or second bf16 of each cell converted to fp32.
INLINE vec number(pairs cells, enum scoring scoring, int second) {
    if (scoring == AS_FP32) return (vec)cells;
    return second ? (vec)(cells & 0xffff0000u) : (vec)(cells << 16);
}

// Computes the scores of `queries` queries from `first` on with LANES * SPAN keys from `key` on.
// Inlined: the last two arguments are constants.
INLINE void score(const scratch *s, const columns *of, long first, long key, long dim,
                  enum scoring scoring, int queries) {
    const float *q = s->queries + first * s->width;
    const char *const *keys = of->at + key / LANES;
    vec sums[QUERIES][SPAN];
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < SPAN; v++) sums[i][v] = (vec){0};
    const long step = scoring == AS_FP32 ? 1 : 2;
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
            UNROLLED for (int v = 0; v < SPAN; v++) column[v] = number(cells[v], scoring, turn);
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

// Adds V of the chunk's positions [from, to), weighted, to the outputs of queries from `first` on:
// `wide` vectors from dimension `d` on. Inlined: the last three arguments are constants.
INLINE void add_values(const scratch *s, const char *const *values, long first, long from, long to,
                  long d, long dim, enum scoring scoring, int queries, int wide) {
    const long step = scoring == AS_FP32 ? 1 : 2;
    float *out = s->out + first * s->width + d;
    const float *weights = s->scores + first * KEYS;
    vec sums[QUERIES][SPAN];
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < wide; v++) sums[i][v] = load(out + i * s->width + v * LANES);
    for (long key = from / step * step; key < to; key += step) {
        pairs cells[SPAN];
        UNROLLED for (int v = 0; v < wide; v++)
            cells[v] = cells_at(values[key / step] + (d + v * LANES) * 4, dim - d - v * LANES);
#if defined(__AVX512BF16__)
        if (scoring == BY_PAIRS) {
            UNROLLED for (int i = 0; i < queries; i++) {
                int32_t two;
                memcpy(&two, (const char *)(weights + i * KEYS) + key * 2, 4);
                const __m512bh each = (__m512bh)_mm512_set1_epi32(two);
                UNROLLED for (int v = 0; v < wide; v++)
                    sums[i][v] =
                        (vec)_mm512_dpbf16_ps((__m512)sums[i][v], (__m512bh)cells[v], each);
            }
            continue;
        }
#endif
        UNROLLED for (int turn = 0; turn < step; turn++)
            UNROLLED for (int i = 0; i < queries; i++) {
                const float each = weights[i * KEYS + key + turn];
                UNROLLED for (int v = 0; v < wide; v++)
                    sums[i][v] += each * number(cells[v], scoring, turn);
            }
    }
    UNROLLED for (int i = 0; i < queries; i++)
        UNROLLED for (int v = 0; v < wide; v++) store(out + i * s->width + v * LANES, sums[i][v]);
}

// Raises a query's highest score to `highest` and rescales its output, if `highest` is larger.
// Returns the highest score.
INLINE float raise_top(const scratch *s, long query, float highest, long dim) {
    float *out = s->out + query * s->width, *sums = s->sums + query * LANES;
    if (highest > s->top[query]) {
        const vec shrink = exponential(all(s->top[query] - highest));
        for (long d = 0; d < dim; d += LANES) store(out + d, load(out + d) * shrink);
        store(sums, load(sums) * shrink);
        s->top[query] = highest;
    }
    return s->top[query];
}

// Turns the scores of the chunk's first `count` keys into softmax weights, for a query that sees
// keys [from, to).
INLINE void softmax_weights(const scratch *s, long query, long from, long to, long count,
                            long dim) {
    float *scores = s->scores + query * KEYS, *sums = s->sums + query * LANES;
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec highest = all(MASKED);
    for (long k = 0; k < count; k += LANES) {
        const ints seen = (lane + (int)k >= (int)from) & (lane + (int)k < (int)to);
        highest = larger(pick(seen, load(scores + k), all(MASKED)), highest);
    }
    float top = MASKED;
    for (int i = 0; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
    top = raise_top(s, query, top, dim);
    vec sum = {0};
    for (long k = 0; k < count; k += LANES) {
        const ints seen = (lane + (int)k >= (int)from) & (lane + (int)k < (int)to);
        const vec weight = pick(seen, exponential(load(scores + k) - all(top)), (vec){0});
        store(scores + k, weight);
        sum += weight;
    }
    store(sums, load(sums) + sum);
}

#if defined(__AVX512BF16__)
INLINE uint64_t first_bits(long count) {
    return count <= 0 ? 0 : count >= 64 ? ~0ull : (1ull << count) - 1;
}

// Does the same as `softmax_weights` with bf16 weights, whose sum is of the rounded weights.
INLINE void softmax_weights_of_pairs(const scratch *s, long query, long from, long to, long count,
                                     long dim) {
    float *scores = s->scores + query * KEYS, *sums = s->sums + query * LANES;
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    const uint64_t seen = first_bits(to) & ~first_bits(from);
    __m512 highest = _mm512_set1_ps(MASKED);
    for (long k = 0; k < count; k += LANES)
        highest = _mm512_mask_max_ps(highest, seen >> k, (__m512)load(scores + k), highest);
    const float top = raise_top(s, query, _mm512_reduce_max_ps(highest), dim);
    const __m512 by = _mm512_set1_ps(LOG2_E), less = _mm512_set1_ps(top * LOG2_E);
    __m512 sum = (__m512)load(sums);
    for (long k = 0; k < count; k += 2 * LANES) {
        const __m512 first = _mm512_fmsub_ps((__m512)load(scores + k), by, less);
        const __m512 second = _mm512_fmsub_ps((__m512)load(scores + k + LANES), by, less);
        const __m512bh both = _mm512_cvtne2ps_pbh(power_of_2(seen >> (k + LANES), second),
                                                  power_of_2(seen >> k, first));
        memcpy(scores + k / 2, &both, sizeof both);
        sum = _mm512_dpbf16_ps(sum, both, ones);
    }
    store(sums, (vec)sum);
}
_Static_assert(KEYS == 64, "a chunk's keys are bits of a word");
#endif

#define SCORE(Q) \
    for (long key = 0; key < to; key += LANES * SPAN) score(s, of, first, key, dim, scoring, Q);
#define ADD_VALUES(Q)                                                                        \
    for (long d = 0; d < dim;) {                                                        \
        const int wide = dim - d > (SPAN - 1) * LANES ? SPAN : dim - d > LANES ? 2 : 1; \
        if (wide == SPAN) add_values(s, values, first, from, to, d, dim, scoring, Q, SPAN);       \
        else if (wide == 2) add_values(s, values, first, from, to, d, dim, scoring, Q, 2);        \
        else add_values(s, values, first, from, to, d, dim, scoring, Q, 1);                       \
        d += wide * LANES;                                                              \
    }
#define EACH(DO)                                          \
    for (long first = 0; first < count; first += QUERIES) \
        switch (min_long(count - first, QUERIES)) {          \
        case 1: DO(1) break;                              \
        case 2: DO(2) break;                              \
        case 3: DO(3) break;                              \
        case 4: DO(4) break;                              \
        case 5: DO(5) break;                              \
        default: DO(6)                                    \
        }

INLINE void softmax_weights_as(const scratch *s, long query, long from, long to, long count,
                               long dim, enum scoring scoring) {
#if defined(__AVX512BF16__)
    if (scoring == BY_PAIRS || scoring == BY_TILES) {
        softmax_weights_of_pairs(s, query, from, to, count, dim);
        return;
    }
#endif
    (void)scoring;
    softmax_weights(s, query, from, to, count, dim);
}

INLINE void score_all(const scratch *s, const columns *of, long count, long to, long dim,
                      enum scoring scoring) {
#if defined(__AMX_TILE__)
    if (scoring == BY_TILES) {
        score_tiles(s, of, count, to, dim);
        return;
    }
#endif
    EACH(SCORE)
}

INLINE void add_all_values(const scratch *s, const char *const *values, long count, long from,
                           long to, long dim, enum scoring scoring) {
#if defined(__AMX_TILE__)
    if (scoring == BY_TILES) {
        add_value_tiles(s, values, count, from, to, dim);
        return;
    }
#endif
    EACH(ADD_VALUES)
}

// Copies the queries, multiplied by their scale, as fp32 or bf16 depending on `scoring`.
INLINE void copy_queries(const query_rows *of, const scratch *s, long dim, enum scoring scoring) {
    float scaled[dim];
    for (long q = 0; q < of->rows * of->group; q++) {
        const long row = q / of->group, head = q % of->group;
        const float *from = of->queries + row * of->stride + head * of->head_stride;
        if (of->scale != 1) {
            for (long d = 0; d < dim; d++) scaled[d] = from[d] * of->scale;
            from = scaled;
        }
        if (scoring == BY_PAIRS || scoring == BY_TILES) narrow(from, dim, (uint16_t *)(s->queries + q * s->width));
        else memcpy(s->queries + q * s->width, from, dim * 4);
    }
}

// Replaces x [count] by cap * tanh(x / cap).
static void softcap(float *x, long count, float cap) {
    long k = 0;
    for (; k + LANES <= count; k += LANES) store(x + k, tangent(load(x + k) * (1 / cap)) * cap);
    if (k == count) return;
    const vec last = tangent(part((const char *)(x + k), count - k, 0) * (1 / cap)) * cap;
    memcpy(x + k, &last, (count - k) * 4);
}

INLINE void attend_to(const query_rows *of, const paged *kv, const scratch *s,
                      enum scoring scoring) {
    const long dim = kv->dim, value_dim = kv->value_dim;
    const long count = of->rows * of->group;
    const long end = of->position + of->rows;
    const long begin = max_long(of->position + 1 - kv->window, kv->first);
    copy_queries(of, s, dim, scoring);
#if defined(__AMX_TILE__)
    if (scoring == BY_TILES) shape_attention(count);
#endif
    for (long q = 0; q < count; q++) s->top[q] = MASKED;
    memset(s->out, 0, count * s->width * 4);
    memset(s->sums, 0, count * LANES * 4);
    for (long chunk = begin / KEYS * KEYS; chunk < end; chunk += KEYS) {
        const long from = max_long(begin - chunk, 0), to = min_long(end - chunk, KEYS);
        const columns keys = columns_of(kv, s, chunk, from, to);
        const char *values[KEYS];
        values_of(kv, s, chunk, from, to, values);
        score_all(s, &keys, count, to, dim, scoring);
        for (long q = 0; q < count && of->cap; q++) softcap(s->scores + q * KEYS, to, of->cap);
        for (long q = 0; q < count; q++) {
            const long position = of->position + q / of->group;
            const long seen = max_long(position + 1 - kv->window, kv->first) - chunk;
            softmax_weights_as(s, q, max_long(seen, 0), min_long(position + 1 - chunk, KEYS), to,
                               value_dim, scoring);
        }
        add_all_values(s, values, count, from, to, value_dim, scoring);
    }
#if defined(__AMX_TILE__)
    if (scoring == BY_TILES) _tile_release();
#endif
    for (long q = 0; q < count; q++) {
        const long row = q / of->group, head = q % of->group;
        float *out = of->out + row * of->out_stride + head * value_dim;
        float sum = total(load(s->sums + q * LANES));
        if (of->sinks) sum += exponential(all(of->sinks[head] - s->top[q]))[0];
        for (long d = 0; d < value_dim; d++) out[d] = s->out[q * s->width + d] / sum;
    }
}

static void attend(const query_rows *of, const paged *kv, const scratch *s) {
    switch (kv->scoring) {
    case AS_FP32: attend_to(of, kv, s, AS_FP32); return;
    case BF16_AS_FP32: attend_to(of, kv, s, BF16_AS_FP32); return;
    case BY_PAIRS: attend_to(of, kv, s, BY_PAIRS); return;
    case BY_TILES: attend_to(of, kv, s, BY_TILES); return;
    }
}
