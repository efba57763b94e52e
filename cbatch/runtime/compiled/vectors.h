// Vectors of floats, with the functions that products and attention share.
//
// Every computation has one order of operations, and `a * b + c` is always contracted in the same
// way. So bits depend on the values only.

#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

// LANES: floats in a vector. A product's tile has up to ROWS rows by FULL panels, or up to half as
// many rows by WIDE panels (a multiple of FULL). A tile of attention has QUERIES queries by SPAN
// vectors. The sums of a tile and the columns that it reads fill the registers.
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#define FULL 3
#define WIDE 6
#define SPAN 4
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 4
#define FULL 2
#define WIDE 4
#define SPAN 2
#else
#define LANES 4
#define ROWS 8
#define FULL 2
#define WIDE 4
#define SPAN 4
#endif
#define QUERIES 6
#ifndef INLINE  // tests define their own for a short compilation
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))
#endif

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t pairs __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t pairs_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t halves_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint8_t bytes_at __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t chars_at __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE long rounded(long count, long to) { return (count + to - 1) / to * to; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }

INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec load(const float *x) { return *(const vec_at *)x; }
INLINE void store(float *to, vec x) { *(vec_at *)to = x; }
INLINE vec pick(ints mask, vec yes, vec no) {
    return (vec)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE vec larger(vec a, vec b) { return pick(a > b, a, b); }

// Returns the first `count` elements at x, fp32 or bf16, as fp32; the others are 0.
static __attribute__((noinline)) vec part(const char *x, long count, int half) {
    uint32_t result[LANES] = {0};
    if (half)
        for (long i = 0; i < count; i++) result[i] = (uint32_t)((const uint16_t *)x)[i] << 16;
    else memcpy(result, x, count * 4);
    return load((const float *)result);
}
INLINE vec widened(const char *x, long count, int half) {
    if (count < LANES) return part(x, count, half);
    return half ? (vec)(__builtin_convertvector(*(const halves_at *)x, pairs) << 16)
                : load((const float *)x);
}

// Returns the first `count` cells of 4 bytes; the others are 0.
INLINE pairs cells_at(const char *x, long count) { return (pairs)widened(x, count, 0); }

// Rounds to the nearest bf16, ties to even; NaN stays NaN.
INLINE uint16_t bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x == x ? near : 0x7fc0;
}

static void round_row(const float *x, long count, uint16_t *to) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec each = load(x + i);
        const pairs bits = (pairs)each, near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const pairs result = (pairs)pick(each == each, (vec)near, (vec)(near * 0 + 0x7fc0));
        *(halves_at *)(to + i) = __builtin_convertvector(result, halves_at);
    }
    for (; i < count; i++) to[i] = bf16(x[i]);
}

// Rounds a row to bf16 for products by pairs; an odd count is padded with a zero.
static void narrow(const float *x, long count, uint16_t *to) {
#if defined(__AVX512BF16__)
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const __m256bh result = _mm512_cvtneps_pbh((__m512)load(x + i));
        memcpy(to + i, &result, sizeof result);
    }
    if (i < count) {
        float rest[LANES] = {0};
        memcpy(rest, x + i, (count - i) * 4);
        const __m256bh result = _mm512_cvtneps_pbh((__m512)load(rest));
        memcpy(to + i, &result, rounded(count - i, 2) * 2);
    }
#else
    round_row(x, count, to);
    if (count % 2) to[count] = 0;
#endif
}

// Converts fp16 to fp32, exactly; for scales, which are neither infinite nor NaN.
INLINE vec from_halves(const void *x) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(x));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128(x));
#endif
    const pairs bits = __builtin_convertvector(*(const halves_at *)x, pairs);
    const vec size = (vec)((bits & 0x7fff) << 13) * all(0x1p112f);
    return (vec)((pairs)size | (bits & 0x8000) << 16);
}

INLINE float total(vec x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static float squares(const float *x, long count) {
    vec sum = {0};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += load(x + i) * load(x + i);
    float result = total(sum);
    for (; i < count; i++) result += x[i] * x[i];
    return result;
}

#define LOG2_E 1.44269504f

// Returns e^x within 2 units in the last place for x clamped to [-87, 88]. With n = x / ln 2
// rounded and r = x - n ln 2: 2^n e^r, where e^r is its Taylor polynomial of degree 7.
INLINE vec exponential(vec x) {
    x = pick(x < all(-87.0f), all(-87.0f), x);
    x = pick(x > all(88.0f), all(88.0f), x);
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: floats above it are the integers
    const vec shifted = x * LOG2_E + shift, n = shifted - shift;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const ints exponent = ((ints)shifted - (ints)shift + 127) << 23;
    return p * (vec)exponent;
}

// Returns tanh x within 3 units in the last place; near 0 by the polynomial of Cephes' tanhf.
INLINE vec tangent(vec x) {
    const vec size = pick(x < all(0), -x, x), square = x * x;
    const vec far = 1 - 2 / (exponential(size + size) + 1);
    vec p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square + -5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square + -3.33332819422e-1f;
    const vec near = p * square * x + x;
    return pick(size < all(0.625f), near, pick(x < all(0), -far, far));
}

#if defined(__AVX512BF16__)
// Returns 2^x with a relative error of 3e-6, for results that are rounded to bf16; 0 where `mask`
// is 0. With n = floor(x), 2^x is 2^n times a fitted polynomial of degree 4 of x - n.
INLINE __m512 power_of_2(__mmask16 mask, __m512 x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0.01353417f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.05201146f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24144275f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69300384f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.00000259f));
    return _mm512_maskz_scalef_ps(mask, p, x);
}
#endif
