// A ragged batch: the position of each row, and the pieces of rows that attend together.

#pragma once
#include "paged.h"

#define MAX_QUERIES 48  // queries in a tile of attention

// query_lens, context_lens [sequences]; tables [sequences, table_width] of block ids below
// `blocks`.
typedef struct {
    const int32_t *query_lens, *context_lens, *tables;
    long rows, sequences, table_width, blocks, block_size;
} ragged;

// Consecutive rows of one sequence; the first row is at `position`.
typedef struct {
    long sequence, row, rows, position;
} piece;

INLINE long queries_of_piece(long group) { return max_long(MAX_QUERIES / group, 1) * group; }

// Writes each row's sequence and position. Returns nonzero if the tables do not hold the context or
// have an invalid block id, or if the number of rows is wrong.
static int locate(const ragged *of, long *sequences, long *positions) {
    long row = 0;
    for (long b = 0; b < of->sequences; b++) {
        const long length = of->query_lens[b], start = of->context_lens[b] - length;
        const long blocks = (of->context_lens[b] + of->block_size - 1) / of->block_size;
        if (start < 0 || blocks > of->table_width || row + length > of->rows) return 1;
        for (long i = 0; i < blocks; i++) {
            const long block = of->tables[b * of->table_width + i];
            if (block < 0 || block >= of->blocks) return 1;
        }
        for (long i = 0; i < length; i++) {
            sequences[row + i] = b;
            positions[row + i] = start + i;
        }
        row += length;
    }
    return row != of->rows;
}

// Cuts the rows into pieces, and returns their number: at most one per row.
static long cut(const ragged *of, long group, piece *pieces) {
    const long max_rows = queries_of_piece(group) / group;
    long row = 0, count = 0;
    for (long b = 0; b < of->sequences; b++) {
        const long length = of->query_lens[b], start = of->context_lens[b] - length;
        for (long i = 0; i < length; i += max_rows)
            pieces[count++] = (piece){b, row + i, min_long(max_rows, length - i), start + i};
        row += length;
    }
    return count;
}
