// Tokens drawn by exponential races: argmax of p / E, with the noise E that noise.py specifies.
//
// E is at least u, the uniform number that it is computed from. So E is computed only for tokens
// whose p / u reaches the best p / E so far: a few of each row.

#pragma once
#include "team.h"
#include "vectors.h"

#define GROUPS 32  // of four tokens, whose words are computed at the same time
#define RACERS (4 * GROUPS)
#define ROUNDING 1.0001f  // E may be less than u by rounding
#define NEGLIGIBLE 1e-30f  // smaller products may be rounded by more

// The coordinates of a row's noise; `key` is the seed's low and high word.
typedef struct {
    int64_t key[2], choice, position, purpose;
} noise_row;

typedef struct {
    member me;
    const float *chances;
    const noise_row *noise;
    const float *coefficients;
    int64_t *tokens;
    long rows, vocab;
} race_job;

// Computes the words of the tokens from 4 `first` on: Philox4x32-10.
static void words_of(const noise_row *of, uint32_t first, uint32_t *words) {
    uint32_t a[GROUPS], b[GROUPS], c[GROUPS], d[GROUPS];
    uint32_t low = of->key[0], high = of->key[1];
    for (int i = 0; i < GROUPS; i++)
        a[i] = first + i, b[i] = of->position, c[i] = of->choice, d[i] = of->purpose;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < GROUPS; i++) {
            const uint64_t x = (uint64_t)0xD2511F53 * a[i], y = (uint64_t)0xCD9E8D57 * c[i];
            a[i] = (uint32_t)(y >> 32) ^ b[i] ^ low, b[i] = y;
            c[i] = (uint32_t)(x >> 32) ^ d[i] ^ high, d[i] = x;
        }
        low += 0x9E3779B9, high += 0xBB67AE85;
    }
    for (int i = 0; i < GROUPS; i++)
        words[4 * i] = a[i], words[4 * i + 1] = b[i], words[4 * i + 2] = c[i],
                  words[4 * i + 3] = d[i];
}

static float uniform_of(uint32_t word) { return (float)((uint64_t)word + 1) * 0x1p-32f; }

// Returns -ln(1 - u), as specified. Values are volatile, since no product may be fused with a sum.
// `coefficients` has ln 2, and then those of the polynomial, the constant term first.
static float exponential_of(uint32_t word, const float *coefficients) {
    const float left = (float)(~word ? ~word : 1);
    int32_t bits;
    memcpy(&bits, &left, sizeof bits);
    const int32_t exponent = (bits - 0x3F400000) >> 23;
    const int32_t fraction_bits = bits - exponent * (1 << 23);
    float fraction;
    memcpy(&fraction, &fraction_bits, sizeof fraction);
    const int small = word < 1u << 30;
    volatile float r = small ? -uniform_of(word) : fraction - 1;
    volatile float poly = coefficients[10], product;
    for (int i = 9; i > 0; i--) product = poly * r, poly = product + coefficients[i];
    product = r * poly;
    volatile float whole = (small ? 0 : 32 - exponent) * coefficients[0];
    return whole - product;
}

static long winner_of(const float *chances, const noise_row *noise, long vocab,
                      const float *coefficients) {
    long winner = 0;
    float best = 0;
    for (long from = 0; from < vocab; from += RACERS) {
        float racers[RACERS] = {0};
        uint32_t words[RACERS];
        int any = 0, reaching = 0;
        memcpy(racers, chances + from, min_long(vocab - from, RACERS) * sizeof *racers);
        for (int i = 0; i < RACERS; i++) any |= racers[i] > 0;
        if (!any) continue;
        words_of(noise, from / 4, words);
        for (int i = 0; i < RACERS; i++) {
            const float u = (float)(int32_t)(words[i] >> 8) * 0x1p-24f;  // rounded down
            reaching |= racers[i] * ROUNDING + NEGLIGIBLE >= best * u;
        }
        if (!reaching) continue;
        for (int i = 0; i < RACERS; i++) {
            if (racers[i] * ROUNDING + NEGLIGIBLE < best * uniform_of(words[i])) continue;
            const float score = racers[i] / exponential_of(words[i], coefficients);
            if (score > best) best = score, winner = from + i;
        }
    }
    return winner;
}

static void race_all(void *job) {
    race_job *p = job;
    for (long r; (r = claim(&p->me, p->rows)) >= 0;)
        p->tokens[r] =
            winner_of(p->chances + r * p->vocab, p->noise + r, p->vocab, p->coefficients);
}
