// The most likely token of each row of logits.

#pragma once
#include "team.h"
#include "vectors.h"

#define SPAN_LOGITS 1024  // first the maximum of each span of logits is found, then its index
#define ACCUMULATORS 4  // vectors of independent maxima

typedef struct {
    member me;
    const float *logits;
    int64_t *tokens;
    uint8_t *finite;
    long rows, vocab;
} choice_job;

// Returns the highest of `count` logits; `odd` becomes NaN if a logit is not finite.
static float highest_of(const float *x, long count, float *odd) {
    vec top[ACCUMULATORS], zeros[ACCUMULATORS];
    UNROLLED for (int i = 0; i < ACCUMULATORS; i++)
        top[i] = all(-__builtin_inff()), zeros[i] = (vec){0};
    long k = 0;
    for (; k + ACCUMULATORS * LANES <= count; k += ACCUMULATORS * LANES)
        UNROLLED for (int i = 0; i < ACCUMULATORS; i++) {
            const vec each = load(x + k + i * LANES);
            top[i] = larger(each, top[i]);
            zeros[i] += each * 0.0f;
        }
    float highest = -__builtin_inff();
    UNROLLED for (int i = 0; i < ACCUMULATORS; i++) {
        for (int l = 0; l < LANES; l++) highest = top[i][l] > highest ? top[i][l] : highest;
        *odd += total(zeros[i]);
    }
    for (; k < count; k++) {
        highest = x[k] > highest ? x[k] : highest;
        *odd += x[k] * 0.0f;
    }
    return highest;
}

// Returns the first index of the highest logit, or of a NaN if there is one.
static long choice_of(const float *x, long vocab, uint8_t *finite) {
    float highest = -__builtin_inff(), odd = 0;
    long from = 0, token = 0;
    for (long k = 0; k < vocab; k += SPAN_LOGITS) {
        const float here = highest_of(x + k, min_long(vocab - k, SPAN_LOGITS), &odd);
        if (here > highest) highest = here, from = k;
    }
    *finite = odd == 0;
    if (!*finite)
        for (long k = 0; k < vocab; k++)
            if (x[k] != x[k]) return k;
    for (token = from; token < vocab - 1 && x[token] != highest;) token++;
    return token;
}

static void choose_all(void *job) {
    choice_job *p = job;
    for (long r; (r = claim(&p->me, p->rows)) >= 0;)
        p->tokens[r] = choice_of(p->logits + r * p->vocab, p->vocab, p->finite + r);
}
