// A decoder's whole pass over a ragged batch, by one team of threads; single products; and lookups.

#include "attention.h"
#include "lookup.h"
#include "product.h"

#define MOST_QUERIES 48  // of a tile of attention
#define GAP LANES        // floats behind a row, which keep rows out of the same cache sets

// qkv makes rows [kv_heads, group + 2, dim]: the queries of each KV head, then its K, then its V.
// `qk_weight` [group + 1, dim] may be null. A row sees the last `window` positions.
typedef struct {
    linear qkv, out, gate_up, down;
    const float *qk_weight;
    long window;
} layer;

// embedding [vocab, hidden]: rows of fp32 or bf16, of block types panels; cos_sin [positions,
// dim / 2, 2].
typedef struct {
    const layer *layers;
    linear head;
    const char *embedding;
    const float *cos_sin;
    long num_layers, hidden, kv_heads, group, dim, inner, vocab, embedding_type;
    float eps;
} decoder;

// tokens [rows]; query_lens and context_lens [sequences]; tables [sequences, table_width]; wanted
// [num_wanted]: flat rows; kv [layers, kv_heads, blocks] of blocks as attention.h has them; logits
// [num_wanted, vocab]. `progress` is null, or a number that goes up during the pass, at least once a layer.
typedef struct {
    const int64_t *tokens, *wanted;
    const int32_t *query_lens, *context_lens, *tables;
    char *kv;
    float *logits;
    char *memory;  // of `memory_bytes`
    int64_t *progress;
    long rows, sequences, table_width, num_wanted, blocks, block_size, kv_half, threads;
} step;

typedef struct {
    long sequence, row, rows, position;
} piece;

// A pass as each thread sees it. Working memory: rows of floats, a stride apart, and as the next
// product takes them.
typedef struct {
    member me;
    const decoder *model;
    const step *step;
    char *taken;
    float *residual, *normed, *fused, *attended, *gate_up, *inner, *some_residual, *some_attended;
    float *logits;
    float *scratches;
    long hidden_stride, fused_stride, attended_stride, gate_up_stride, inner_stride;
    long taken_stride, scratch_size, queries, num_pieces, rows, num_wanted;
    piece *pieces;
    long *positions, *sequences;
} pass;

_Static_assert(sizeof(pass) <= MOST_JOB_BYTES, "a pass is handed over whole");

#define LOOPS_OF_A_LAYER 10
#define OTHER_LOOPS 4

static long carve(pass *p, char *memory, long rows, long threads) {
    const decoder *m = p->model;
    const long heads = m->kv_heads * m->group * m->dim, width = heads + 2 * m->kv_heads * m->dim;
    long used = 0;
#define TAKE(to, count, type) \
    (to) = (type *)(memory + used), used += rounded((count) * (long)sizeof(type), 64)
#define ROWS_OF(to, stride, width) \
    p->stride = rounded(width, LANES) + GAP, TAKE(p->to, rows *p->stride, float)
    ROWS_OF(residual, hidden_stride, m->hidden);
    ROWS_OF(some_residual, hidden_stride, m->hidden);
    ROWS_OF(normed, hidden_stride, m->hidden);
    ROWS_OF(fused, fused_stride, width);
    ROWS_OF(attended, attended_stride, heads);
    ROWS_OF(some_attended, attended_stride, heads);
    ROWS_OF(gate_up, gate_up_stride, 2 * m->inner);
    ROWS_OF(inner, inner_stride, m->inner);
    p->queries = most(MOST_QUERIES / m->group, 1) * m->group;
    p->scratch_size = rounded(scratch_floats(p->queries, m->dim), LANES);
    TAKE(p->scratches, threads *p->scratch_size, float);
    TAKE(p->pieces, rows, piece);
    TAKE(p->positions, rows, long);
    TAKE(p->sequences, rows, long);
    p->taken_stride = taken_bytes(most(most(m->hidden, heads), m->inner)) + 4 * GAP;
    TAKE(p->taken, rows *p->taken_stride, char);
    return used;
}

// Bytes that `decode` needs for so many rows, or wanted ones, and threads; aligned to 64.
long memory_bytes(const decoder *model, long rows, long threads) {
    pass p = {.model = model};
    return carve(&p, 0, rows, threads);
}

// Which row is where. Nonzero where a number of the step does not fit: 1 a token, 2 a block, 3 a
// wanted row.
static int plan(pass *p) {
    const decoder *m = p->model;
    const step *s = p->step;
    const long most_rows = p->queries / m->group;
    long row = 0;
    p->num_pieces = 0;
    for (long i = 0; i < s->rows; i++)
        if (s->tokens[i] < 0 || s->tokens[i] >= m->vocab) return 1;
    for (long i = 0; i < s->num_wanted; i++)
        if (s->wanted[i] < 0 || s->wanted[i] >= s->rows) return 3;
    for (long b = 0; b < s->sequences; b++) {
        const long length = s->query_lens[b], start = s->context_lens[b] - length;
        const long blocks = (s->context_lens[b] + s->block_size - 1) / s->block_size;
        if (start < 0 || blocks > s->table_width || row + length > s->rows) return 2;
        for (long i = 0; i < blocks; i++) {
            const long block = s->tables[b * s->table_width + i];
            if (block < 0 || block >= s->blocks) return 2;
        }
        for (long i = 0; i < length; i += most_rows)
            p->pieces[p->num_pieces++] =
                (piece){b, row + i, least(most_rows, length - i), start + i};
        for (long i = 0; i < length; i++) {
            p->sequences[row + i] = b;
            p->positions[row + i] = start + i;
        }
        row += length;
    }
    return row == s->rows ? 0 : 2;
}

static float squares(const float *x, long count) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(x + i) * load(x + i);
    float found = total(sum);
    for (; i < count; i++) found += x[i] * x[i];
    return found;
}

static void embed(pass *p) {
    const decoder *m = p->model;
    const int half = m->embedding_type == BF16, whole = m->embedding_type == F32;
    for (long r; (r = take(&p->me, p->rows)) >= 0;) {
        const long token = p->step->tokens[r], size = half ? 2 : 4;
        float *to = p->residual + r * p->hidden_stride;
        if (half || whole) {
            const char *from = m->embedding + token * m->hidden * size;
            for (long k = 0; k < m->hidden; k += LANES)
                store(to + k, widened(from + k * size, m->hidden - k, half));
        } else {
            const long bytes = block_panel_bytes(form_of((int)m->embedding_type), m->hidden);
            decode_row((int)m->embedding_type, m->embedding + token / LANES * bytes, m->hidden,
                       token % LANES, to);
        }
    }
}

// A row that is ready, as the product takes it.
static void give(const pass *p, const linear *to, const float *x, long row) {
    hand_over(takes_of(to), x, to->in, p->taken + row * p->taken_stride);
}

// normed = x / sqrt(sum(x^2) + n eps) * scale: RMSNorm, whose weight times sqrt(n) is the scale.
static void normalize(pass *p, const linear *to) {
    const long hidden = p->model->hidden;
    const float *scale = to->scale;
    for (long r; (r = take(&p->me, p->rows)) >= 0;) {
        const float *x = p->residual + r * p->hidden_stride;
        float *normed = p->normed + r * p->hidden_stride;
        const float by = 1 / __builtin_sqrtf(squares(x, hidden) + hidden * p->model->eps);
        for (long k = 0; k < hidden; k++) normed[k] = scale ? x[k] * by * scale[k] : x[k] * by;
        give(p, to, normed, r);
    }
}

// Pairs of dimensions side by side, rotated (arXiv:2104.09864) and scaled.
static void rotate(const float *x, const float *by, float scale, long dim, float *restrict to) {
    for (long d = 0; d < dim; d += 2) {
        to[d] = (x[d] * by[d] - x[d + 1] * by[d + 1]) * scale;
        to[d + 1] = (x[d] * by[d + 1] + x[d + 1] * by[d]) * scale;
    }
}

// K [dim] and V [dim] to place `at` of a block.
static void store_kv(const float *key, const float *value, long dim, long block_size, long at,
                     char *block, int half) {
    const value_place to = value_place_of(at, block_size, dim, half);
    uint16_t keys[dim], values[dim];
    if (half) round_row(key, dim, keys), round_row(value, dim, values);
    const char *cells = half ? (const char *)keys : (const char *)key;
    for (long i = 0; i < (half ? dim / 2 : dim); i++)
        memcpy(block + (i * block_size + at) * 4, cells + i * 4, 4);
    if (!half) memcpy(block + to.first, value, dim * 4);
    for (long d = 0; half && d < dim; d++) memcpy(block + to.first + d * to.stride, values + d, 2);
}

// Norms, rotates and scales the heads of a row and KV head; its K and V go to place `at` of a block.
static void place(const pass *p, const layer *l, float *heads, const float *cos_sin, char *block,
                  long at) {
    const decoder *m = p->model;
    const long dim = m->dim, size = p->step->block_size, half = p->step->kv_half;
    const float scale = 1 / __builtin_sqrtf(dim);
    float rotated[dim];
    for (long g = 0; g <= m->group; g++) {
        float *x = heads + g * dim;
        if (l->qk_weight) {
            const float by = 1 / __builtin_sqrtf(squares(x, dim) / dim + m->eps);
            for (long d = 0; d < dim; d++) x[d] = x[d] * by * l->qk_weight[g * dim + d];
        }
        rotate(x, cos_sin, g < m->group ? scale : 1, dim, rotated);
        if (g < m->group) memcpy(x, rotated, dim * 4);
    }
    store_kv(rotated, heads + (m->group + 1) * dim, dim, size, at, block, half);
}

// By pairs where the products are, too: else bits are those of every processor.
static enum scoring scoring_of(const pass *p) {
    if (!p->step->kv_half) return WHOLE;
    return takes_of(&p->model->layers->qkv) == PAIRS ? BY_PAIRS : WIDENED;
}

static char *blocks_of(const pass *p, long layer, long head) {
    const step *s = p->step;
    const long bytes = block_bytes_of(s->block_size, p->model->dim, scoring_of(p));
    return s->kv + (layer * p->model->kv_heads + head) * s->blocks * bytes;
}

static void place_all(pass *p, long index) {
    const decoder *m = p->model;
    const step *s = p->step;
    const long bytes = block_bytes_of(s->block_size, m->dim, scoring_of(p));
    for (long r; (r = take(&p->me, p->rows)) >= 0;) {
        const long position = p->positions[r], which = position / s->block_size;
        const long block = s->tables[p->sequences[r] * s->table_width + which];
        for (long head = 0; head < m->kv_heads; head++)
            place(p, m->layers + index,
                  p->fused + r * p->fused_stride + head * (m->group + 2) * m->dim,
                  m->cos_sin + position * m->dim, blocks_of(p, index, head) + block * bytes,
                  position - which * s->block_size);
    }
}

static void attend_all(pass *p, long index) {
    const decoder *m = p->model;
    const step *s = p->step;
    const scratch mine =
        scratch_at(p->scratches + p->me.thread * p->scratch_size, p->queries, m->dim);
    for (long i; (i = take(&p->me, p->num_pieces * m->kv_heads)) >= 0;) {
        const piece *of = p->pieces + i / m->kv_heads;
        const long head = i % m->kv_heads;
        const paged kv = {blocks_of(p, index, head), s->tables + of->sequence * s->table_width,
                          s->block_size, m->dim, m->layers[index].window, scoring_of(p)};
        const attending queries = {
            p->fused + of->row * p->fused_stride + head * (m->group + 2) * m->dim,
            p->attended + of->row * p->attended_stride + head * m->group * m->dim,
            of->rows, m->group, of->position, p->fused_stride, p->attended_stride};
        attend(&queries, &kv, &mine);
    }
}

// inner = silu(gate) * up of gate_up [gate | up].
static void activate(pass *p, const linear *to) {
    const long inner = p->model->inner;
    for (long r; (r = take(&p->me, p->rows)) >= 0;) {
        const float *gate = p->gate_up + r * p->gate_up_stride, *up = gate + inner;
        float *found = p->inner + r * p->inner_stride;
        for (long k = 0; k < inner; k += LANES) {
            const vec g = load(gate + k);
            store(found + k, g / (exponential(-g) + all(1)) * load(up + k));
        }
        give(p, to, found, r);
    }
}

// From here on each row is alone: those not wanted have had their part.
static void select_wanted(pass *p) {
    for (long i; (i = take(&p->me, p->num_wanted)) >= 0;) {
        const long row = p->step->wanted[i];
        memcpy(p->some_residual + i * p->hidden_stride, p->residual + row * p->hidden_stride,
               p->hidden_stride * 4);
        memcpy(p->some_attended + i * p->attended_stride, p->attended + row * p->attended_stride,
               p->attended_stride * 4);
    }
    p->residual = p->some_residual, p->attended = p->some_attended, p->rows = p->num_wanted;
}

static void give_attended(pass *p, const linear *to) {
    if (takes_of(to) == FLOATS) return;
    for (long r; (r = take(&p->me, p->rows)) >= 0;)
        give(p, to, p->attended + r * p->attended_stride, r);
}

static void multiply(pass *p, const linear *by, const float *x, long x_stride, float *y,
                     long y_stride, int add) {
    const int floats = takes_of(by) == FLOATS;
    const problem of = {by, floats ? (const char *)x : p->taken, y,
                        floats ? x_stride * 4 : p->taken_stride, y_stride, add};
    product_of(&of, p->rows, &p->me);
}

// The whole pass, by each thread of the team. What a step points to may be gone where a thread is
// late, and is looked at only in what it has taken.
static void run(void *job) {
    pass p = *(const pass *)job;
    const decoder *m = p.model;
    const long last = m->num_layers - 1;
    embed(&p);
    for (long i = 0; i <= last; i++) {
        const layer *l = m->layers + i;
        normalize(&p, &l->qkv);
        multiply(&p, &l->qkv, p.normed, p.hidden_stride, p.fused, p.fused_stride, 0);
        place_all(&p, i);
        if (i == last && !p.num_wanted) return;
        attend_all(&p, i);
        if (i == last) select_wanted(&p);
        give_attended(&p, &l->out);
        multiply(&p, &l->out, p.attended, p.attended_stride, p.residual, p.hidden_stride, 1);
        normalize(&p, &l->gate_up);
        multiply(&p, &l->gate_up, p.normed, p.hidden_stride, p.gate_up, p.gate_up_stride, 0);
        activate(&p, &l->down);
        multiply(&p, &l->down, p.inner, p.inner_stride, p.residual, p.hidden_stride, 1);
    }
    normalize(&p, &m->head);
    multiply(&p, &m->head, p.normed, p.hidden_stride, p.logits, m->vocab, 0);
}

// Writes K and V of all rows, and the logits of those wanted. Nonzero, and nothing is computed,
// where the step does not fit: see `plan`.
int decode(const decoder *model, const step *step) {
    pass p = {.me.progress = step->progress, .model = model, .step = step};
    p.rows = step->rows, p.num_wanted = step->num_wanted, p.logits = step->logits;
    carve(&p, step->memory, most(step->rows, step->num_wanted), step->threads);
    const int wrong = plan(&p);
    if (wrong) return wrong;
    together(run, &p, sizeof p, step->threads,
             model->num_layers * LOOPS_OF_A_LAYER + OTHER_LOOPS);
    return 0;
}

// After it, nothing that was given to `decode` is looked at any more.
void rest(void) { wait_until_all_rest(); }

int lanes(void) { return LANES; }

// Of a panel of `type`; 0 where it is none of ours.
long bytes_of_panel(int type, long in) {
    if (type != F32 && type != BF16 && !form_of(type).bits) return 0;
    const segment p = {.type = type};
    return panel_bytes(&p, in);
}

typedef struct {
    member me;
    const uint8_t *blocks;
    char *panels;
    long out, in;
    int type;
} packing;

static void pack_all(void *job) {
    packing *p = job;
    const segment of = {.out = p->out, .type = p->type};
    for (long i; (i = take(&p->me, panels_of(&of))) >= 0;)
        repack(p->type, p->blocks, p->out, p->in, i, p->panels + i * panel_bytes(&of, p->in));
}

// Blocks [out, in] of a type, as a file has them, to panels.
void pack(int type, const uint8_t *blocks, long out, long in, char *panels, long threads) {
    packing p = {.blocks = blocks, .panels = panels, .out = out, .in = in, .type = type};
    together(pack_all, &p, sizeof p, threads, 1);
    rest();
}

typedef struct {
    member me;
    problem of;
    long rows;
} multiplying;

static void multiply_all(void *job) {
    multiplying *p = job;
    product_of(&p->of, p->rows, &p->me);
}

// x [rows, in], y [rows, columns]. Nonzero, and nothing is computed, where memory runs out.
int product(const linear *by, const float *x, float *y, long rows, long columns, long threads) {
    const long in = by->in, stride = taken_bytes(in);
    const enum takes as = takes_of(by);
    float *scaled = by->scale ? malloc(rows * in * sizeof *scaled) : 0;
    char *taken = as == FLOATS ? 0 : malloc(rows * stride);
    const int short_of = (by->scale && !scaled) || (as != FLOATS && !taken);
    for (long r = 0; r < rows && !short_of; r++) {
        const float *row = x + r * in;
        if (scaled) {
            for (long k = 0; k < in; k++) scaled[r * in + k] = row[k] * by->scale[k];
            row = scaled + r * in;
        }
        if (taken) hand_over(as, row, in, taken + r * stride);
    }
    if (!short_of) {
        const char *given = taken ? taken : (const char *)(scaled ? scaled : x);
        multiplying p = {.of = {by, given, y, taken ? stride : in * 4, columns, 0}, .rows = rows};
        together(multiply_all, &p, sizeof p, threads, 1);
        rest();
    }
    free(scaled), free(taken);
    return short_of;
}
