// The data of attention: a sequence's K and V in blocks, read in chunks of KEYS positions, and a
// thread's working memory.

#pragma once
#include "vectors.h"

#define KEYS 64        // positions of a chunk
#define MASKED -1e30f  // the score of a key that is not seen

// How K and V are multiplied: as fp32; as bf16 converted to fp32; by instructions for pairs of
// bf16; by those for tiles. The last two round queries and weights to bf16.
enum scoring { AS_FP32, BF16_AS_FP32, BY_PAIRS, BY_TILES };

// A layer's blocks of one KV head, [blocks, block_size * (dim + value_dim)]; `table` has the ids of
// a sequence's blocks. A block has K, transposed, then V, in cells of 4 bytes. fp32: [dim,
// block_size] and [block_size, value_dim]. bf16: pairs of dimensions [dim / 2, block_size, 2] and
// pairs of positions [block_size / 2, value_dim, 2]. If the block size is odd, V has no pairs:
// [block_size, value_dim]. Positions before `first` are not seen.
typedef struct {
    const char *blocks;
    const int32_t *table;
    long block_size, dim, value_dim, window, first;
    enum scoring scoring;
} paged;

INLINE long kv_size(enum scoring scoring) { return scoring == AS_FP32 ? 4 : 2; }
INLINE long block_bytes_of(long block_size, long dim, long value_dim, enum scoring scoring) {
    return block_size * (dim + value_dim) * kv_size(scoring);
}
INLINE long bytes_of_block(const paged *kv) {
    return block_bytes_of(kv->block_size, kv->dim, kv->value_dim, kv->scoring);
}

// V of a position in its block, in bytes: the start, and the distance from dimension to dimension.
typedef struct {
    long first, stride;
} value_place;

INLINE value_place value_place_of(long at, long block_size, long dim, long value_dim, int half) {
    const long paired = half && block_size % 2 == 0, odd = paired && at % 2;
    return (value_place){(block_size * dim + (at - odd) * value_dim + odd) * (half ? 2 : 4),
                         paired || !half ? 4 : 2};
}

// Stores K [dim] and V [value_dim] at place `at` of a block.
static void store_kv(const float *key, const float *value, long dim, long value_dim, long block_size,
                     long at, char *block, int half) {
    const value_place to = value_place_of(at, block_size, dim, value_dim, half);
    uint16_t keys[dim], values[value_dim];
    if (half) round_row(key, dim, keys), round_row(value, value_dim, values);
    const char *cells = half ? (const char *)keys : (const char *)key;
    for (long i = 0; i < (half ? dim / 2 : dim); i++)
        memcpy(block + (i * block_size + at) * 4, cells + i * 4, 4);
    if (!half) memcpy(block + to.first, value, value_dim * 4);
    for (long d = 0; half && d < value_dim; d++)
        memcpy(block + to.first + d * to.stride, values + d, 2);
}

// The queries of a piece: `rows` rows of `group` heads; the first row is at `position`. Query (r,
// g) is at queries + r * stride + g * head_stride and is multiplied by `scale`; its output goes to
// out + r * out_stride + g * value_dim. Scores become cap * tanh(score / cap), unless `cap` is 0.
// `sinks` [group], unless null, are the scores of one more key for each head, whose value is 0.
typedef struct {
    const float *queries;
    float *out;
    long rows, group, position, stride, head_stride, out_stride;
    float scale, cap;
    const float *sinks;
} query_rows;

// The working memory of one thread, for up to `count` queries.
typedef struct {
    float *queries, *scores, *out, *sums, *top;
    float *keys, *values;  // gathered cells of a chunk: K of fp32, or K and V of bf16
    long width;            // floats of a query, and of its output
} scratch;

INLINE long scratch_width(long dim) { return rounded(dim, LANES * SPAN); }
INLINE long scratch_floats(long count, long dim) {
    const long width = scratch_width(dim);
    count = rounded(count, LANES);
    return count * (2 * width + KEYS + LANES) + width * KEYS + count;
}

INLINE scratch scratch_at(float *at, long count, long dim) {
    scratch s = {.width = scratch_width(dim)};
    count = rounded(count, LANES);
    s.queries = at, s.out = s.queries + count * s.width, s.scores = s.out + count * s.width;
    s.keys = s.scores + count * KEYS, s.values = s.keys + s.width * KEYS / 2;
    s.sums = s.keys + s.width * KEYS;
    s.top = s.sums + count * LANES;
    return s;
}

// K of a chunk: the addresses of its groups of LANES keys, in a block or gathered. Cells of
// successive dimensions, or of pairs of dimensions, are `stride` bytes apart.
typedef struct {
    const char *at[KEYS / LANES];
    long stride;
} columns;

// Returns K of the chunk's positions [0, to), of which [from, to) are in use. If the block size is
// not a multiple of LANES, K is gathered.
static columns columns_of(const paged *kv, const scratch *s, long chunk, long from, long to) {
    const long size = kv->block_size, bytes = bytes_of_block(kv);
    const long rows = kv->dim * kv_size(kv->scoring) / 4;
    columns result = {.stride = 4 * (size % LANES ? KEYS : size)};
    for (long k = from; k < to && size % LANES; k++) {
        const long block = (chunk + k) / size, at = chunk + k - block * size;
        const char *cell = kv->blocks + kv->table[block] * bytes + at * 4;
        for (long d = 0; d < rows; d++) memcpy(s->keys + d * KEYS + k, cell + d * size * 4, 4);
    }
    for (long g = 0; g < KEYS / LANES; g++) {
        const long first = max_long(min_long(g, (to - 1) / LANES), from / LANES) * LANES;
        const long block = (chunk + first) / size, at = chunk + first - block * size;
        if (size % LANES) result.at[g] = (const char *)(s->keys + first);
        else result.at[g] = kv->blocks + kv->table[block] * bytes + at * 4;
    }
    return result;
}

// Gathers V of two positions as pairs; a position outside [from, to) is 0.
static const char *gathered(const paged *kv, float *cells, long from, long to) {
    const long size = kv->block_size, dim = kv->value_dim, bytes = bytes_of_block(kv);
    memset(cells, 0, dim * 4);
    for (long k = from; k < to; k++) {
        const value_place of = value_place_of(k % size, size, kv->dim, dim, 1);
        const char *value = kv->blocks + kv->table[k / size] * bytes + of.first;
        char *to = (char *)cells + k % 2 * 2;
        for (long d = 0; d < dim; d++) memcpy(to + d * 4, value + d * of.stride, 2);
    }
    return (const char *)cells;
}
