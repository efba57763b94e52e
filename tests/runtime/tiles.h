// Emulates the AMX instructions that the kernels use, for processors without them (Intel SDM, vol.
// 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBF16PS, TDPBSUD). An operand that a processor
// would reject ends the process. Include this first; the build needs the other instructions of such
// a processor.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define __AMX_TILE__ 1

static _Thread_local struct {
    uint8_t rows[8];
    uint16_t row_bytes[8];
    char data[8][16][64];
} tiles;

static void by_hand_need(int right) {
    if (!right) abort();
}

static void by_hand_loadconfig(const void *from) {
    const uint8_t *all = from;
    memset(&tiles, 0, sizeof tiles);
    by_hand_need(all[0] == 1 && !all[1]);
    for (int i = 2; i < 16; i++) by_hand_need(!all[i]);
    for (int t = 0; t < 16; t++) {
        uint16_t bytes;
        memcpy(&bytes, all + 16 + 2 * t, 2);
        by_hand_need(bytes <= 64 && all[48 + t] <= 16 && !bytes == !all[48 + t]);
        by_hand_need(t < 8 || !bytes);
        if (t < 8) tiles.rows[t] = all[48 + t], tiles.row_bytes[t] = bytes;
    }
}

static void by_hand_zero(int t) {
    by_hand_need(tiles.rows[t]);
    memset(tiles.data[t], 0, sizeof tiles.data[t]);
}

static void by_hand_loadd(int t, const void *from, long stride) {
    by_hand_zero(t);
    for (int r = 0; r < tiles.rows[t]; r++)
        memcpy(tiles.data[t][r], (const char *)from + r * stride, tiles.row_bytes[t]);
}

static void by_hand_stored(int t, void *to, long stride) {
    by_hand_need(tiles.rows[t]);
    for (int r = 0; r < tiles.rows[t]; r++)
        memcpy((char *)to + r * stride, tiles.data[t][r], tiles.row_bytes[t]);
}

// Returns 0 for subnormal numbers, as these instructions do.
static float by_hand_normal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? x * 0 : x; }
static float by_hand_half(uint16_t bits) {
    const uint32_t whole = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &whole, 4);
    return by_hand_normal(x);
}

static int by_hand_steps(int sums, int x, int w) {
    by_hand_need(tiles.rows[sums] && tiles.rows[sums] == tiles.rows[x]);
    by_hand_need(tiles.row_bytes[x] == 4 * tiles.rows[w]);
    by_hand_need(tiles.row_bytes[sums] == tiles.row_bytes[w]);
    return tiles.rows[w];
}

static void by_hand_dpbsud(int sums, int x, int w) {
    const int steps = by_hand_steps(sums, x, w);
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            int32_t sum;
            memcpy(&sum, tiles.data[sums][m] + 4 * n, 4);
            for (int k = 0; k < 4 * steps; k++)
                sum += (int8_t)tiles.data[x][m][k] * (uint8_t)tiles.data[w][k / 4][4 * n + k % 4];
            memcpy(tiles.data[sums][m] + 4 * n, &sum, 4);
        }
}

static void by_hand_dpbf16ps(int sums, int x, int w) {
    const int pairs = by_hand_steps(sums, x, w);
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            float found[2] = {0}, sum;
            for (int k = 0; k < pairs; k++)
                for (int odd = 0; odd < 2; odd++) {
                    uint16_t a, b;
                    memcpy(&a, tiles.data[x][m] + 4 * k + 2 * odd, 2);
                    memcpy(&b, tiles.data[w][k] + 4 * n + 2 * odd, 2);
                    const float more = __builtin_fmaf(by_hand_half(a), by_hand_half(b), found[odd]);
                    found[odd] = by_hand_normal(more);
                }
            memcpy(&sum, tiles.data[sums][m] + 4 * n, 4);
            sum = by_hand_normal(by_hand_normal(sum) + by_hand_normal(found[0] + found[1]));
            memcpy(tiles.data[sums][m] + 4 * n, &sum, 4);
        }
}

static void by_hand_release(void) { memset(&tiles, 0, sizeof tiles); }

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig by_hand_loadconfig
#define _tile_loadd by_hand_loadd
#define _tile_stored by_hand_stored
#define _tile_zero by_hand_zero
#define _tile_dpbf16ps by_hand_dpbf16ps
#define _tile_dpbsud by_hand_dpbsud
#define _tile_release by_hand_release
