// One layer's attention over paged KV, for models whose other operations run in torch.

#pragma once
#include "attention.h"
#include "ragged.h"
#include "team.h"

#define SINGLE_THREAD_BELOW (1 << 16)  // multiplications below which one thread is faster

// The data of a step that its layers share. The kernel fills sequences, positions and pieces
// [rows]; scratches has [threads, scratch_size] floats.
typedef struct {
    ragged rows;
    long *sequences, *positions;
    piece *pieces;
    float *scratches;
    long scratch_size, threads;
} attention_step;

// blocks [kv_heads, blocks] as in paged.h, in bf16 if `half`, multiplied by pairs if the processor
// can. Head h of row r of queries [rows, kv_heads * group, dim] begins at r
// * query_row + h * query_head. Keys [rows, kv_heads, dim] and values [rows, kv_heads, value_dim]
// have their own strides, and are null if the blocks hold them already. out [rows, kv_heads *
// group, value_dim]; sinks [kv_heads * group] or null.
typedef struct {
    char *blocks;
    const float *queries, *keys, *values, *sinks;
    float *out;
    long query_row, query_head, key_row, key_head, value_row, value_head;
    long kv_heads, group, dim, value_dim, window, half;
    float scale, cap;
} attention_layer;

// One call of `attend_layer`. Each thread has a copy; a late thread reads only its copy.
typedef struct {
    member me;
    attention_step step;
    attention_layer layer;
    long num_pieces;
} layer_job;

_Static_assert(sizeof(layer_job) <= MAX_JOB_BYTES, "a layer is handed over whole");

static enum scoring layer_scoring(const attention_layer *l) {
    if (!l->half) return AS_FP32;
#if defined(__AMX_TILE__)
    if (fits_tiles(l->dim, l->value_dim)) return BY_TILES;
#endif
#if defined(__AVX512BF16__)
    return BY_PAIRS;
#else
    return BF16_AS_FP32;
#endif
}

// Returns the blocks of a sequence and KV head.
static paged layer_blocks(const layer_job *p, long sequence, long head) {
    const attention_layer *l = &p->layer;
    const ragged *of = &p->step.rows;
    paged kv = {0, of->tables + sequence * of->table_width, of->block_size, l->dim, l->value_dim,
                l->window, 0, layer_scoring(l)};
    kv.blocks = l->blocks + head * of->blocks * bytes_of_block(&kv);
    return kv;
}

static void store_row(const layer_job *p, long row) {
    const attention_layer *l = &p->layer;
    const long size = p->step.rows.block_size, position = p->step.positions[row];
    const long which = position / size;
    for (long head = 0; head < l->kv_heads; head++) {
        const paged kv = layer_blocks(p, p->step.sequences[row], head);
        char *block = (char *)kv.blocks + kv.table[which] * bytes_of_block(&kv);
        store_kv(l->keys + row * l->key_row + head * l->key_head,
                 l->values + row * l->value_row + head * l->value_head, l->dim, l->value_dim, size,
                 position - which * size, block, (int)l->half);
    }
}

static void attend_piece(const layer_job *p, const piece *piece, long head) {
    const attention_layer *l = &p->layer;
    const paged kv = layer_blocks(p, piece->sequence, head);
    const scratch mine = scratch_at(p->step.scratches + p->me.thread * p->step.scratch_size,
                                    queries_of_piece(l->group), max_long(l->dim, l->value_dim));
    const long first = head * l->group, out_row = l->kv_heads * l->group * l->value_dim;
    const query_rows queries = {
        l->queries + piece->row * l->query_row + first * l->query_head,
        l->out + piece->row * out_row + first * l->value_dim, piece->rows, l->group,
        piece->position, l->query_row, l->query_head, out_row, l->scale, l->cap, l->sinks ? l->sinks + first : 0};
    attend(&queries, &kv, &mine);
}

static void attend_layer_all(void *job) {
    layer_job *p = job;
    const long heads = p->layer.kv_heads;
    if (p->layer.keys)
        EACH_CLAIMED(&p->me, p->step.rows.rows, r) store_row(p, r);
    for (long i; (i = claim(&p->me, p->num_pieces * heads)) >= 0;)
        attend_piece(p, p->step.pieces + i / heads, i % heads);
}

// Returns the number of threads: 1 for little work, because waking threads takes longer.
static long threads_of(const layer_job *p) {
    const attention_layer *l = &p->layer;
    const ragged *of = &p->step.rows;
    long keys = 0;
    for (long b = 0; b < of->sequences; b++)
        keys += of->query_lens[b] * min_long(of->context_lens[b], l->window);
    const long each = l->kv_heads * l->group * (l->dim + l->value_dim);
    return keys * each < SINGLE_THREAD_BELOW ? 1 : p->step.threads;
}
