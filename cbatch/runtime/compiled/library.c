// Entry points: single products, greedy and drawn tokens, experts, attention. The headers have those
// of whole passes and lookups.

#include "decoder.h"
#include "greedy.h"
#include "layer_attention.h"
#include "lookup.h"
#include "race.h"

// Prepares a step for calls of `attend_layer`. Returns 2, as `decode` does, if the step is invalid.
// Threads stay awake between calls until `end_attention`.
int begin_attention(const attention_step *of) {
    if (locate(&of->rows, of->sequences, of->positions)) return 2;
    expect_jobs(1);
    return 0;
}

void end_attention(void) { expect_jobs(0); }

void attend_layer(const attention_step *of, const attention_layer *layer) {
    layer_job p = {.step = *of, .layer = *layer};
    p.num_pieces = cut(&of->rows, layer->group, of->pieces);
    run_job(attend_layer_all, &p, sizeof p, threads_of(&p), 2);
}

// Returns the floats of one thread's working memory, a multiple of a cache line.
long attention_floats(long group, long dim, long value_dim) {
    const long floats = scratch_floats(queries_of_piece(group), max_long(dim, value_dim));
    return rounded(floats, LINE_BYTES / 4);
}

long experts_bytes(const expert_step *of) {
    expert_job p = {.step = *of};
    p.step.memory = 0;
    return carve_experts(&p);
}

// Computes experts; returns the number of (row, expert) pairs. If a chosen expert does not exist,
// computes nothing and returns a negative number.
long run_experts(const expert_step *of) {
    expert_job p = {.step = *of};
    carve_experts(&p);
    p.pairs = sort_pairs(&p);
    if (p.pairs >= 0) run_job(experts_all, &p, sizeof p, of->threads, 5);
    return p.pairs;
}

int lanes(void) { return LANES; }

// Properties of a product that decide which steps are fused with it.
int row_form(const linear *weights) { return row_form_of(weights); }
int can_gate(const linear *weights) { return gates(weights); }

// Returns the bytes of a panel of `type`; 0 for a type that is not supported.
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
} pack_job;

static void pack_all(void *job) {
    pack_job *p = job;
    const segment of = {.out = p->out, .type = p->type};
    for (long i; (i = claim(&p->me, panels_of(&of))) >= 0;)
        repack(p->type, p->blocks, p->out, p->in, i, p->panels + i * panel_bytes(&of, p->in));
}

// Repacks blocks [out, in] of a type, as stored in a file, into panels.
void pack(int type, const uint8_t *blocks, long out, long in, char *panels, long threads) {
    pack_job p = {.blocks = blocks, .panels = panels, .out = out, .in = in, .type = type};
    run_job(pack_all, &p, sizeof p, threads, 1);
    rest();
}

typedef struct {
    member me;
    problem args;
    long rows;
} product_job;

static void multiply_all(void *job) {
    product_job *p = job;
    product_of(&p->args, p->rows, &p->me);
}

// Computes y [rows, columns] from x [rows, in]. Returns nonzero, without y, if memory runs out.
int product(const linear *weights, const float *x, float *y, long rows, long columns,
            long threads) {
    const long in = weights->in, stride = converted_bytes(in);
    const enum row_form form = row_form_of(weights);
    char *converted = form == FLOATS ? 0 : malloc(rows * stride);
    const int out_of_memory = form != FLOATS && !converted;
    for (long r = 0; r < rows && converted; r++)
        convert_row(form, x + r * in, in, converted + r * stride);
    if (!out_of_memory) {
        const char *input = converted ? converted : (const char *)x;
        product_job p = {.args = {weights, input, y, converted ? stride : in * 4, columns},
                         .rows = rows};
        run_job(multiply_all, &p, sizeof p, threads, 1);
        rest();
    }
    free(converted);
    return out_of_memory;
}

// Writes the most likely token of each row of logits [rows, vocab], and whether the row is finite.
void choose(const float *logits, long rows, long vocab, int64_t *tokens, uint8_t *finite,
            long threads) {
    choice_job p = {
        .logits = logits, .tokens = tokens, .finite = finite, .rows = rows, .vocab = vocab};
    run_job(choose_all, &p, sizeof p, threads, 1);
    rest();
}

// Draws a token of each row of `chances` [rows, vocab], which need not be normalised.
void race(const float *chances, long rows, long vocab, const noise_row *noise,
          const float *coefficients, int64_t *tokens, long threads) {
    race_job p = {.chances = chances, .noise = noise, .coefficients = coefficients,
                  .tokens = tokens, .rows = rows, .vocab = vocab};
    run_job(race_all, &p, sizeof p, threads, 1);
    rest();
}
