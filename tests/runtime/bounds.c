// Runs the kernels on random bits, with every buffer exactly as large as required. Compiled with a
// sanitizer, the process ends at a read or write beyond a buffer.

#define INLINE static __attribute__((unused))
#define UNROLLED
#include "library.c"
#include <stdio.h>

static uint64_t state = 1;

static uint32_t draw(void) {  // xorshift (Marsaglia, 2003)
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}
static long below(long count) { return draw() % count; }

static void *room(long bytes) {
    void *found;
    if (posix_memalign(&found, 64, bytes)) abort();
    return found;
}

// Returns random bits; as scales, some are NaN or infinite.
static void *bits(long bytes) {
    uint8_t *found = room(bytes);
    for (long i = 0; i < bytes; i++) found[i] = (uint8_t)draw();
    return found;
}

static float *floats(long count) {
    float *found = room(count * 4);
    for (long i = 0; i < count; i++) found[i] = (float)below(2001) / 1000 - 1;
    return found;
}

static const int types[] = {F32, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K,
                            IQ4_NL, IQ4_XS, MXFP4};
// Bytes of a block in a file (ggml-common.h).
static const long sizes[] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q5_1] = 24, [Q8_0] = 34,
                             [Q4_K] = 144, [Q5_K] = 176, [Q6_K] = 210, [IQ4_NL] = 18, [IQ4_XS] = 136,
                             [Q2_K] = 84, [Q3_K] = 110, [MXFP4] = 17};
#define TYPES (long)(sizeof types / sizeof *types)
static int in_blocks(int type) { return type != F32 && type != BF16; }

// Returns random panels of a matrix; those of a block type are packed from random blocks.
static char *panels_for(int type, long out, long in, long threads) {
    const long bytes = (out + LANES - 1) / LANES * bytes_of_panel(type, in);
    if (!in_blocks(type)) return bits(bytes);
    const long per = form_of(type).scales < SIXES ? CELL : SUPER_CELLS * CELL;
    uint8_t *blocks = bits(out * (in / per) * sizes[type]);
    char *panels = room(bytes);
    pack(type, blocks, out, in, panels, threads);
    free(blocks);
    return panels;
}

static linear linear_of(int type, long out, long in, const float *bias) {
    segment *part = room(sizeof *part);
    *part = (segment){panels_for(type, out, in, 1 + below(2)), out, out, out, 0, type};
    return (linear){part, bias, 1, in};
}

static void let_go(linear *of) { free((void *)of->parts->panels), free((void *)of->parts); }

static void products(void) {
    const long outs[] = {1, LANES - 1, LANES, 7 * LANES + 3};
    for (long t = 0; t < TYPES; t++)
        for (long o = 0; o < 4; o++) {
            const long out = outs[o], in = in_blocks(types[t]) ? 256 * (1 + o % 2) : 5 + 31 * o;
            float *bias = floats(out);
            linear by = linear_of(types[t], out, in, below(2) ? bias : 0);
            for (long i = 0; i < 5; i++) {
                const long rows = 1 + below(below(4) ? 2 * ROWS + 1 : 33);
                float *x = below(4) ? floats(rows * in) : bits(rows * in * 4);
                float *y = room(rows * out * 4);
                if (product(&by, x, y, rows, out, 1 + below(3))) abort();
                free(x), free(y);
            }
            let_go(&by), free(bias);
        }
}

// Runs lookups in random texts of few distinct tokens; a text fills its row.
static void lookups(void) {
    for (long i = 0; i < 400; i++) {
        const long rows = 1 + below(3), length = 1 + below(70), depth = below(12), letters = 1 + below(4);
        const lookup by = {1 + below(3), 3 + below(9), below(2), 0.5 + (double)below(4), 0.1};
        int64_t *tokens = room(rows * length * 8), *requests = room(rows * (4 + depth) * 8);
        for (long k = 0; k < rows * length; k++) tokens[k] = below(letters);
        for (long r = 0; r < rows; r++) {
            const int64_t row[] = {r, 1 + below(length), depth ? below(depth + 1) : 0, 0};
            memcpy(requests + r * (4 + depth), row, sizeof row);
        }
        const long half = 1 + below(40);
        if (look_up(&by, tokens, length, half, requests, rows, depth)) abort();
        free(tokens), free(requests);
    }
}

#define EXPERTS 4
typedef struct {
    decoder model;
    layer layers[2];
    linear up[EXPERTS], down[EXPERTS];
    mixture experts;
    void *held[16];
    long num_held;
} made;

static float *held(made *m, long count) { return m->held[m->num_held++] = floats(count); }

// Replaces the last layer's feed-forward by experts.
static void mix_last(made *m, int type, const float *weight) {
    feed_forward *f = &m->layers[1].forward;
    const long hidden = m->model.hidden, width = f->inner, shared = below(2);
    for (long e = 0; e < EXPERTS; e++) {
        m->up[e] = linear_of(type, 2 * width, hidden, 0);
        m->down[e] = linear_of(type, hidden, width, 0);
    }
    m->experts = (mixture){m->up, m->down, EXPERTS - shared, 1 + below(EXPERTS - shared), shared,
                           below(2), below(3), 1.5f, 1.7f};
    let_go(&f->gate_up), let_go(&f->down);
    f->gate_up = linear_of(F32, EXPERTS, hidden, 0), f->down = (linear){0};
    f->joins.before = (norm){weight, 1e-5f, RMS_NORM, 1}, f->joins.adds_later = 1;
    f->experts = &m->experts;
}

// Sets at random what Llama does not use.
static void vary(made *m, int type, const float *weight) {
    decoder *d = &m->model;
    const long parallel = !below(3);
    d->logit_cap = below(2) ? 2 : 0, d->embedding_scale = 3;
    for (long i = 0; i < 2; i++) {
        attention *a = &m->layers[i].mixer;
        feed_forward *f = &m->layers[i].forward;
        m->layers[i].parallel = parallel;
        a->joins.before.kind = f->joins.before.kind = below(3);
        a->qk_norm = below(4), a->cap = below(2) ? 2 : 0;
        a->sinks = below(2) ? held(m, a->kv_heads * a->group) : 0;
        f->activation = below(3) ? below(2) ? RELU_SQUARED : below(2) : XIELU, f->xielu = weight;
        if (parallel) continue;
        branch *const joins[] = {&a->joins, &f->joins};
        for (long k = 0; k < 2; k++) {
            joins[k]->adds_later = below(2);
            if (!joins[k]->adds_later) continue;
            joins[k]->after = (norm){weight, 1e-5f, below(3), 1}, joins[k]->scale = 0.5f;
        }
    }
    if (!parallel && below(2)) mix_last(m, type, weight);
}

// Fuses at random what may be fused (see lowering.py).
static void lower(layer *layers) {
    for (long i = 0; i < 2; i++) {
        feed_forward *f = &layers[i].forward;
        f->gates_in_product = f->activation == SILU && f->gated && !f->experts && below(4) &&
                              gates(&f->gate_up) && row_form_of(&f->down) == PAIRS;
        layers[i].mixer.joins.before.keeps_rows &= row_form_of(&layers[i].mixer.qkv) == FLOATS || !below(4);
        f->joins.before.keeps_rows &= f->experts || row_form_of(&f->gate_up) == FLOATS || !below(4);
    }
}

// Makes a decoder with weights of one type. Where it is allowed, sizes are not multiples of LANES.
static void make(made *m, int type, long dim, long positions) {
    const long heads = 2, group = 1 + below(3), width = in_blocks(type) ? 256 : 6 * dim;
    const long value_dim = in_blocks(type) || below(2) ? dim : dim / 2;
    const long queries = heads * group, hidden = in_blocks(type) ? 256 : 20 + below(30);
    const long fused = heads * ((group + 1) * dim + value_dim), gated = below(3) > 0;
    *m = (made){.num_held = 0};
    m->model = (decoder){.num_layers = 2, .hidden = hidden, .vocab = 3 * LANES + 1,
                         .choices = 3 * LANES + 1, .kept = below(2) ? 1 : -1,
                         .embedding_scale = 1};
    float *weight = held(m, hidden), *bias = held(m, fused);
    float *qk = held(m, heads * (group + 1) * dim), *cos_sin = held(m, positions * dim);
    const branch joins = {.before = {weight, 1e-5f, RMS_NORM, 1}, .scale = 1, .rescale = 1};
    for (long i = 0; i < 2; i++)
        m->layers[i] = (layer){
            .mixer = {.joins = joins, .qkv = linear_of(type, fused, hidden, bias),
                      .out = linear_of(type, hidden, queries * value_dim, 0), .qk_weight = qk,
                      .cos_sin = cos_sin, .kv_heads = heads, .group = group, .dim = dim,
                      .value_dim = value_dim, .window = i ? 5 : positions, .scale = 0.3f,
                      .qk_norm = below(4), .qk_eps = 1e-5f},
            .forward = {.joins = joins, .gate_up = linear_of(type, (1 + gated) * width, hidden, 0),
                        .down = linear_of(type, hidden, width, 0), .inner = width, .gated = gated},
            .kept = i - 1};
    m->model.layers = m->layers;
    if (below(3)) vary(m, type, weight);
    lower(m->layers);
    m->model.head = linear_of(type, m->model.vocab, hidden, 0);
    m->model.head_norm = joins.before;
    m->model.embedding.type = type, m->model.embedding.width = hidden;
    m->model.embedding.rows = in_blocks(type) ? m->model.head.parts->panels
                                         : bits(m->model.vocab * hidden * (type == BF16 ? 2 : 4));
}

static void unmake(made *m) {
    if (!in_blocks((int)m->model.embedding.type)) free((void *)m->model.embedding.rows);
    for (long i = 0; i < 2; i++) {
        layer *l = m->layers + i;
        let_go(&l->mixer.qkv), let_go(&l->mixer.out), let_go(&l->forward.gate_up);
        if (!l->forward.experts) let_go(&l->forward.down);
        for (long e = 0; l->forward.experts && e < EXPERTS; e++)
            let_go(m->up + e), let_go(m->down + e);
    }
    let_go(&m->model.head);
    for (long i = 0; i < m->num_held; i++) free(m->held[i]);
}

// Runs a pass of three sequences, each of `query` rows after `before` earlier positions. `wrong`
// plants an invalid token (1), block (2) or row of logits (3), or a table that is too narrow (4).
static void one_pass(const made *m, long query, long before, int half, int wrong) {
    const decoder *of = &m->model;
    const long size = 16, context = query + before, width = (context + size - 1) / size;
    const long rows = 3 * query, blocks = 3 * width, threads = 1 + below(3);
    const long num_logit_rows = below(rows + 1);
    int64_t *tokens = room(rows * 8), *logit_rows = room((num_logit_rows + 1) * 8), progress = 0;
    int32_t *queries = room(12), *contexts = room(12), *tables = room(blocks * 4);
    for (long i = 0; i < rows; i++) tokens[i] = below(of->vocab);
    for (long i = 0; i <= num_logit_rows; i++) logit_rows[i] = below(rows);
    for (long i = 0; i < 3; i++) queries[i] = (int32_t)query, contexts[i] = (int32_t)context;
    for (long i = 0; i < blocks; i++) tables[i] = (int32_t)(blocks - 1 - i);
    if (wrong == 1) tokens[below(rows)] = below(2) ? of->vocab : -1;
    if (wrong == 2) tables[below(blocks)] = below(2) ? (int32_t)blocks : -1;
    if (wrong == 3) logit_rows[0] = below(2) ? rows : -1;
    if (wrong == 4) contexts[2] += (int32_t)size;
    const attention *l = &of->layers->mixer;
    const long kv_bytes = l->kv_heads * blocks * size * (l->dim + l->value_dim) * (half ? 2 : 4);
    char *kv[] = {bits(kv_bytes), bits(kv_bytes)};
    const long max_rows = max_long(rows, num_logit_rows);
    step s = {tokens, logit_rows, queries, contexts, tables, kv,
              room((num_logit_rows + 1) * of->vocab * 4), room(memory_bytes(of, max_rows, threads)),
              &progress, 0, room(rows * 2 * of->hidden * 4), rows, 3, width,
              wrong == 3 ? num_logit_rows + 1 : num_logit_rows, blocks, size, half, threads, 2};
    const int status = decode(of, &s);
    rest();
    if (status != (wrong == 4 ? 2 : wrong)) fprintf(stderr, "%d of %d\n", status, wrong), abort();
    free(tokens), free(logit_rows), free(queries), free(contexts), free(tables);
    free(kv[0]), free(kv[1]), free(s.logits), free(s.memory), free(s.hidden);
}

static void decoders(void) {
    const long dims[] = {128, 6, 40, 64, 130};
    for (long t = 0; t < TYPES; t++)
        for (long d = 0; d < (in_blocks(types[t]) ? 1 : 5); d++) {  // heads are whole blocks
            made m;
            make(&m, types[t], dims[d], 200);
            for (int i = 0; i < 9; i++)
                one_pass(&m, 1 + below(i % 3 ? 10 : 90), i % 4 ? below(90) : 0, (int)below(2), i % 5);
            unmake(&m);
        }
}

// Runs attention layers of two sequences. Queries are stored by rows, or by heads.
static void layers(void) {
    const long dims[] = {128, 6, 40, 64, 130};
    for (long i = 0; i < 40; i++) {
        const long dim = dims[below(5)], value_dim = below(3) ? dims[below(5)] : 1 + below(70);
        const long kv_heads = 1 + below(3), group = 1 + below(below(4) ? 5 : 60), heads = kv_heads * group;
        const long query = 1 + below(below(3) ? 5 : 90), context = query + below(90), rows = 2 * query;
        const long size = 1 + below(20), width = (context + size - 1) / size, blocks = 2 * width;
        const long threads = 1 + below(3), half = below(2);
        int32_t *lens = room(8), *contexts = room(8), *tables = room(blocks * 4);
        for (long k = 0; k < 2; k++) lens[k] = (int32_t)query, contexts[k] = (int32_t)context;
        for (long k = 0; k < blocks; k++) tables[k] = (int32_t)(blocks - 1 - k);
        const long floats_of_one = attention_floats(group, dim, value_dim);
        const attention_step s = {{lens, contexts, tables, rows, 2, width, blocks, size},
                                  room(rows * 8), room(rows * 8), room(rows * sizeof(piece)),
                                  room(threads * floats_of_one * 4), floats_of_one, threads};
        attention_layer l = {bits(kv_heads * blocks * size * (dim + value_dim) * (half ? 2 : 4)),
                             floats(rows * heads * dim), floats(rows * kv_heads * dim),
                             floats(rows * kv_heads * value_dim), below(2) ? floats(heads) : 0,
                             room(rows * heads * value_dim * 4), heads * dim, dim, kv_heads * dim, dim,
                             kv_heads * value_dim, value_dim, kv_heads, group, dim, value_dim,
                             1 + below(200), half, 0.3f, below(2) ? 2.0f : 0};
        if (below(2)) l.query_row = dim, l.query_head = rows * dim;
        if (begin_attention(&s)) abort();
        attend_layer(&s, &l);
        end_attention(), rest();
        free(lens), free(contexts), free(tables), free(s.sequences), free(s.positions);
        free(s.pieces), free(s.scratches), free(l.blocks), free((void *)l.queries);
        free((void *)l.keys), free((void *)l.values), free((void *)l.sinks), free(l.out);
    }
}

static void mixtures(void) {
    for (long i = 0; i < 3 * TYPES; i++) {
        const int type = types[i % TYPES];
        const long experts = 1 + below(5), rows = 1 + below(below(4) ? 9 : 300), choices = 1 + below(3);
        const long in = in_blocks(type) ? 256 : 5 + below(40), inner = in_blocks(type) ? 512 : 3 + below(40);
        const long out = 1 + below(50), pairs = rows * choices, stride = rounded(2 * inner, 16) + 16;
        linear up[5], down[5];
        for (long e = 0; e < experts; e++) {
            up[e] = linear_of(type, 2 * inner, in, 0), down[e] = linear_of(type, out, inner, 0);
        }
        int64_t *chosen = room(pairs * 8);
        for (long k = 0; k < pairs; k++) chosen[k] = below(experts + 1);
        expert_step s = {up, down, floats(rows * in), floats(pairs), floats(pairs * inner), chosen,
                         floats(pairs * stride), room(rows * out * 4), 0, experts, rows, choices,
                         in, stride, out, below(4), 3, 1 + below(3), 1.5f, 1.7f};
        s.memory = room(experts_bytes(&s));
        if (s.gating == CALLER) s.parts = 1 + below(2);
        if (run_experts(&s) < 0) abort();
        chosen[below(pairs)] = below(2) ? -1 : experts + 1;
        if (run_experts(&s) >= 0) abort();
        rest();
        for (long e = 0; e < experts; e++) let_go(up + e), let_go(down + e);
        free((void *)s.x), free((void *)s.weights), free((void *)s.inner), free(chosen);
        free(s.gate_up_out), free(s.y), free(s.memory);
    }
}

int main(int count, char **words) {
#if defined(__AMX_TILE__) && !defined(_tile_release)
    syscall(SYS_arch_prctl, 0x1023, 18);  // a process must request AMX tiles (see builds.py)
#endif
    if (count > 1) state = strtoull(words[1], 0, 10) * 2654435761u + 1;
    products();
    lookups();
    decoders();
    layers();
    mixtures();
    puts("fine");
    return 0;
}
