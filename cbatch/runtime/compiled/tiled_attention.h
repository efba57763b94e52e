// The products of attention by AMX tiles: 16 queries by 16 keys, 32 dimensions at a time; then 16
// queries' weights by V of 16 positions.

#pragma once
#include "paged.h"
#include "tiles.h"

#if defined(__AMX_TILE__)
#define PAIRS_OF_A_TILE (TILE / 2)  // pairs of positions in a tile of V

// Returns whether heads of these dimensions consist of whole tiles.
INLINE int fits_tiles(long dim, long value_dim) {
    return dim % (2 * TILE) == 0 && value_dim % TILE == 0;
}

// Configures the tiles: 0 to 3 are sums, 4 queries, 5 K, 6 weights, 7 V. Beyond TILE queries, the
// last tile of queries is padded to TILE rows, whose results are ignored.
static void shape_attention(long queries) {
    shapes all = {.palette = 1};
    queries = min_long(queries, TILE);
    for (int t = 0; t < 4; t++) SHAPE(t, queries, TILE_BYTES);
    SHAPE(4, queries, TILE_BYTES), SHAPE(5, TILE, TILE_BYTES);
    SHAPE(6, queries, TILE_BYTES / 2), SHAPE(7, PAIRS_OF_A_TILE, TILE_BYTES);
    configure_tiles(&all);
}

#define EACH_TILE(DO, count) \
    DO(0) if ((count) > 1) DO(1) if ((count) > 2) DO(2) if ((count) > 3) DO(3)
#define ZERO(T) _tile_zero(T);
#define MULTIPLY(T)                                                   \
    {                                                                 \
        _tile_loadd(5, of->at[T] + d / 2 * of->stride, of->stride);   \
        _tile_dpbf16ps(T, 4, 5);                                      \
    }
#define STORE_SCORES(T) _tile_stored(T, scores + T * TILE, KEYS * 4);

// Computes the scores of all queries with the chunk's first `to` keys.
static void score_tiles(const scratch *s, const columns *of, long count, long to, long dim) {
    const long groups = (to + TILE - 1) / TILE;
    WRITTEN();
    for (long first = 0; first < count; first += TILE) {
        const char *q = (const char *)(s->queries + first * s->width);
        float *scores = s->scores + first * KEYS;
        EACH_TILE(ZERO, groups)
        for (long d = 0; d < dim; d += 2 * TILE) {
            _tile_loadd(4, q + d * 2, s->width * 4);
            EACH_TILE(MULTIPLY, groups)
        }
        EACH_TILE(STORE_SCORES, groups)
    }
}

// Returns V of the TILE positions of a group, one row per pair; positions outside [from, to) are 0.
static const char *value_tile(const paged *kv, const scratch *s, long chunk, long group, long from,
                              long to) {
    const long size = kv->block_size, dim = kv->value_dim, start = group * TILE;
    const long bytes = bytes_of_block(kv);
    const int whole = from <= start && to >= start + TILE;
    if (whole && size % TILE == 0)
        return kv->blocks + kv->table[(chunk + start) / size] * bytes +
               value_place_of((chunk + start) % size, size, kv->dim, dim, 1).first;
    float *cells = s->values + start / 2 * dim;
    for (long k = start; k < start + TILE; k += 2) {
        pairs *row = (pairs *)(cells + (k - start) / 2 * dim);
        const long first = max_long(k, from), last = min_long(k + 2, to);
        if (last - first == 2 && size % 2 == 0)
            memcpy(row, kv->blocks + kv->table[(chunk + k) / size] * bytes +
                   value_place_of((chunk + k) % size, size, kv->dim, dim, 1).first, dim * 4);
        else gathered(kv, (float *)row, chunk + first, chunk + last);
    }
    return (const char *)cells;
}

#define LOAD_SUMS(T) _tile_loadd(T, out + T * TILE, s->width * 4);
#define ADD_VALUE_TILE(T)                                                 \
    {                                                                 \
        _tile_loadd(7, values[group] + (d + T * TILE) * 4, dim * 4);  \
        _tile_dpbf16ps(T, 6, 7);                                      \
    }
#define STORE_SUMS(T) _tile_stored(T, out + T * TILE, s->width * 4);

// Adds V of the chunk's positions [from, to), weighted, to the outputs of all queries.
static void add_value_tiles(const scratch *s, const char *const *values, long count, long from,
                            long to, long dim) {
    WRITTEN();
    for (long first = 0; first < count; first += TILE)
        for (long d = 0; d < dim; d += 4 * TILE) {
            float *out = s->out + first * s->width + d;
            const char *weights = (const char *)(s->scores + first * KEYS);
            const long tiles = (dim - d) / TILE;
            EACH_TILE(LOAD_SUMS, tiles)
            for (long group = from / TILE; group * TILE < to; group++) {
                _tile_loadd(6, weights + group * TILE * 2, KEYS * 4);
                EACH_TILE(ADD_VALUE_TILE, tiles)
            }
            EACH_TILE(STORE_SUMS, tiles)
        }
}
#endif
