// y = (x * scale) W^T + bias for rows of fp32 and W [out, in] of fp32 or bf16, as it lies.
//
// Each sum runs over `in` in lanes, in order, and its lanes are added in one fixed tree: the bits
// of a row depend neither on how many rows share the product nor on the number of threads.

#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define ROWS 8    // most rows of a tile
#define OUTS 8    // most outputs of a tile
#define BLOCK 48  // outputs whose weights stay in a cache while all rows pass: a multiple of tiles'
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef float quad __attribute__((vector_size(16)));
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

INLINE float sum_of(vec v) {
    union { vec all; quad part[LANES / 4]; } lanes = {v};
    UNROLLED for (int width = LANES / 8; width; width /= 2)
        UNROLLED for (int i = 0; i < width; i++) lanes.part[i] += lanes.part[i + width];
    const quad four = lanes.part[0];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// `rows` rows with `outs` outputs; both and `half` are constants where this is inlined. bf16 lies
// in pairs, so its rows come with even and odd columns apart, LANES of each in turn.
INLINE void tile(const float *x, const void *w, const float *bias, float *y, long in, long out,
                 int half, int rows, int outs) {
    vec sums[ROWS][OUTS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int o = 0; o < outs; o++) sums[r][o] = (vec){0};
    for (long k = 0; k < in; k += half ? 2 * LANES : LANES)
        UNROLLED for (int o = 0; o < outs; o++) {
            if (half) {
                const bits pairs = *(const bits_at *)((const uint16_t *)w + o * in + k);
                const vec even = (vec)(pairs << 16), odd = (vec)(pairs & 0xffff0000u);
                UNROLLED for (int r = 0; r < rows; r++)
                    sums[r][o] += *(const vec_at *)(x + r * in + k) * even;
                UNROLLED for (int r = 0; r < rows; r++)
                    sums[r][o] += *(const vec_at *)(x + r * in + k + LANES) * odd;
            } else {
                const vec weights = *(const vec_at *)((const float *)w + o * in + k);
                UNROLLED for (int r = 0; r < rows; r++)
                    sums[r][o] += *(const vec_at *)(x + r * in + k) * weights;
            }
        }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int o = 0; o < outs; o++)
            y[r * out + o] = sum_of(sums[r][o]) + (bias ? bias[o] : 0.0f);
}

#define TILES(R, O)                                                                            \
    for (; o + (O) <= count; o += (O))                                                         \
        tile(x + r * in, w + o * row_bytes, bias ? bias + o : 0, y + r * out + o, in, out,     \
             half, R, O);
#define PASS(R, O)                                                                             \
    {                                                                                          \
        long o = 0;                                                                            \
        TILES(R, O)                                                                            \
        TILES(R, 1)                                                                            \
    }

INLINE void block(const float *x, const char *w, const float *bias, float *y, long rows, long in,
                  long out, long count, int half) {
    const long row_bytes = in * (half ? 2 : 4);
    long r = 0;
    for (; r + ROWS <= rows; r += ROWS) PASS(ROWS, 3)
    switch (rows - r) {
    case 1: PASS(1, 8) break;
    case 2: PASS(2, 8) break;
    case 3: PASS(3, 6) break;
    case 4: PASS(4, 6) break;
    case 5: PASS(5, 3) break;
    case 6: PASS(6, 3) break;
    case 7: PASS(7, 3) break;
    }
}

// A row times `scale` (which may be absent), as tiles want it.
static void prepare(float *to, const float *from, const float *scale, long in, int half) {
    if (!half) {
        for (long k = 0; k < in; k++) to[k] = from[k] * scale[k];
        return;
    }
    for (long k = 0; k < in; k += 2 * LANES)
        for (long i = 0; i < LANES; i++) {
            const long even = k + 2 * i;
            to[k + i] = scale ? from[even] * scale[even] : from[even];
            to[k + LANES + i] = scale ? from[even + 1] * scale[even + 1] : from[even + 1];
        }
}

// bf16 weights as fp32, in the order of prepared rows.
static void widen(float *to, const uint16_t *from, long count) {
    for (long k = 0; k < count; k += 2 * LANES) {
        const bits pairs = *(const bits_at *)(from + k);
        *(bits_at *)(to + k) = pairs << 16;
        *(bits_at *)(to + k + LANES) = pairs & 0xffff0000u;
    }
}

// Nonzero, and nothing is computed, where `in` is no multiple of 32 or memory runs out.
int product(const float *x, const float *scale, const void *w, const float *bias, float *y,
            long rows, long in, long out, int half, int threads) {
    const int prepared = half || scale;
    float *own = prepared ? aligned_alloc(64, rows * in * sizeof *own) : 0;
    if (in % 32 || (prepared && !own)) {
        free(own);
        return 1;
    }
    const float *ready = prepared ? own : x;
    const long blocks = (out + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        // With more rows than a tile has, weights are widened once and not for each tile.
        float *wide = half && rows > ROWS ? aligned_alloc(64, BLOCK * in * sizeof *wide) : 0;
        if (prepared) {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++) prepare(own + r * in, x + r * in, scale, in, half);
        }
#pragma omp for schedule(dynamic)
        for (long b = 0; b < blocks; b++) {
            const long first = b * BLOCK, left = out - first, count = left < BLOCK ? left : BLOCK;
            const char *mine = (const char *)w + first * in * (half ? 2 : 4);
            const float *its = bias ? bias + first : 0;
            if (wide) widen(wide, (const uint16_t *)mine, count * in);
            if (half && !wide) block(ready, mine, its, y + first, rows, in, out, count, 1);
            else block(ready, wide ? (char *)wide : mine, its, y + first, rows, in, out, count, 0);
        }
        free(wide);
    }
    free(own);
    return 0;
}
