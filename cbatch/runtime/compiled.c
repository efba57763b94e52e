// y = (x * scale) W^T + bias for rows of fp32 and W of fp32 or bf16, in panels of LANES outputs:
// all columns of a panel one after another, bf16 ones in pairs (the even column in the low half).
//
// Each output is summed over the columns in their order: the bits of a row depend neither on how
// many rows share the product nor on the number of threads.

#include <stdint.h>
#include <stdlib.h>

// LANES: a vector. ROWS: most rows of a tile. FULL: its panels then, and WIDE, a multiple, with at
// most half as many rows. Its sums, and the columns they take, fill the registers.
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#define FULL 3
#define WIDE 6
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 4
#define FULL 2
#define WIDE 4
#else
#define LANES 4
#define ROWS 8
#define FULL 2
#define WIDE 4
#endif
#define UNROLLED _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t pairs __attribute__((vector_size(4 * LANES), may_alias));

typedef struct {
    const float *x, *bias;
    const char *w;
    float *y;
    long in, out, panel_bytes;
} problem;

// Rows from `row` with panels from `panel` on. Inlined: the last three are constants.
INLINE void tile(const problem *of, long row, long panel, int half, int rows, int panels) {
    const long in = of->in, out = of->out, first = panel * LANES;
    const float *x = of->x + row * in;
    const char *w = of->w + panel * of->panel_bytes;
    vec sums[ROWS][WIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < panels; p++) sums[r][p] = (vec){0};
    for (long k = 0; k < in; k += 2) {
        vec columns[2][WIDE];
        UNROLLED for (int p = 0; p < panels; p++) {
            const char *at = w + p * of->panel_bytes + k * LANES * (half ? 2 : 4);
            if (half) {
                const pairs both = *(const pairs *)at;
                columns[0][p] = (vec)(both << 16);
                columns[1][p] = (vec)(both & 0xffff0000u);
            } else {
                columns[0][p] = ((const vec *)at)[0];
                columns[1][p] = ((const vec *)at)[1];
            }
        }
        UNROLLED for (int i = 0; i < 2; i++)
            UNROLLED for (int r = 0; r < rows; r++) {
                const float each = x[r * in + k + i];
                UNROLLED for (int p = 0; p < panels; p++) sums[r][p] += each * columns[i][p];
            }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            float *to = of->y + (row + r) * out + first + p * LANES;
            const float *bias = of->bias ? of->bias + first + p * LANES : 0;
            const long left = out - first - p * LANES;
            if (left >= LANES) {
                vec found = sums[r][p];
                if (bias) found += *(const vec_at *)bias;
                *(vec_at *)to = found;
            } else  // the last panel is filled up
                for (long i = 0; i < left; i++) to[i] = sums[r][p][i] + (bias ? bias[i] : 0.0f);
        }
}

#define TILES(R, P) \
    for (; p + (P) <= last; p += (P)) tile(of, r, p, half, R, P);
#define PANELS(R, P)   \
    {                  \
        long p = first; \
        TILES(R, P)    \
        TILES(R, FULL) \
        TILES(R, 1)    \
    }

// All rows with the panels from `first` to before `last`, whose weights stay in a cache meanwhile.
INLINE void band(const problem *of, long rows, long first, long last, int half) {
    long r = 0;
    for (; r + ROWS <= rows; r += ROWS) PANELS(ROWS, FULL)
    switch (rows - r) {
    case 1: PANELS(1, WIDE) break;
    case 2: PANELS(2, WIDE) break;
#if ROWS == 4
    case 3: PANELS(3, FULL) break;
#else
    case 3: PANELS(3, WIDE) break;
    case 4: PANELS(4, WIDE) break;
    case 5: PANELS(5, FULL) break;
    case 6: PANELS(6, FULL) break;
    case 7: PANELS(7, FULL) break;
#endif
    }
}

int lanes(void) { return LANES; }

// x [rows, in], scale [in] or null, bias [out] or null, y [rows, out]; `in` is even and `w` aligned
// to 64 bytes. Nonzero, and nothing is computed, where memory runs out.
int product(const float *x, const float *scale, const void *w, const float *bias, float *y,
            long rows, long in, long out, int half, int threads) {
    float *scaled = scale ? malloc(rows * in * sizeof *scaled) : 0;
    if (scale && !scaled) return 1;
    if (scale)
        for (long r = 0; r < rows; r++)
            for (long k = 0; k < in; k++) scaled[r * in + k] = x[r * in + k] * scale[k];
    const problem of = {scale ? scaled : x, bias, w, y, in, out, in * LANES * (half ? 2 : 4)};
    const long panels = (out + LANES - 1) / LANES;
    const long width = panels < 4 * WIDE * threads ? FULL : WIDE, bands = (panels + width - 1) / width;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long b = 0; b < bands; b++) {
        const long first = b * width, end = first + width, last = end < panels ? end : panels;
        if (half) band(&of, rows, first, last, 1);
        else band(&of, rows, first, last, 0);
    }
    free(scaled);
    return 0;
}
