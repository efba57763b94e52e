// Products with weights of GGUF's block types. Rows are rounded to 8 bits, 32 values at a time.
//
// 32 columns of an output are a cell. A weight is s * (code - offset) + m. Codes and rounded values
// are multiplied as integers, whose sum does not depend on the order. Then each cell, in the order
// of the columns, adds one fused multiply-add to the output: two if it has two scales, one more for
// each m. So an output's bits depend on its row and weights only, not even on the width of vectors.

#pragma once
#include "vectors.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CELL 32        // columns
#define BLOCKS_AHEAD 16384  // bytes of a panel to prefetch ahead
#define SUPER_CELLS 8  // cells in a block of 256 columns
#define CODE_BYTES (4 * LANES)  // a vector of codes, one byte each: 4 columns of LANES outputs

enum { Q4_0 = 2, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K };
enum { IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39 };

// How a cell stores s and m. D: s in fp16. DM: s and m in fp16. POWER: s is 2^(8 bits - 128). SIXES:
// s is 6 bits times d, and -m is 6 bits times a second d. SIGNED: s is 8 bits times d. HALVES: like
// SIGNED, for each half of a cell. FOURS: like SIXES, with 4 bits for each half. Each d is fp16,
// stored once per SUPER_CELLS cells.
enum scales { D, DM, POWER, SIXES, SIGNED, HALVES, FOURS };
typedef struct {
    int bits, scales, offset, table;  // table: codes are indices, into IQ4_VALUES or FP4_VALUES
} form;

INLINE form form_of(int type) {
    switch (type) {
    case Q4_0: return (form){4, D, 8, 0};
    case Q4_1: return (form){4, DM, 0, 0};
    case Q5_0: return (form){5, D, 16, 0};
    case Q5_1: return (form){5, DM, 0, 0};
    case Q8_0: return (form){8, D, 128, 0};
    case Q2_K: return (form){2, FOURS, 0, 0};
    case Q3_K: return (form){3, HALVES, 4, 0};
    case Q4_K: return (form){4, SIXES, 0, 0};
    case Q5_K: return (form){5, SIXES, 0, 0};
    case Q6_K: return (form){6, HALVES, 32, 0};
    case IQ4_NL: return (form){4, D, 128, 1};
    case IQ4_XS: return (form){4, SIGNED, 128, 1};
    case MXFP4: return (form){4, POWER, 12, 2};
    default: return (form){0, 0, 0, 0};
    }
}

// The values of IQ4 codes, + 128.
#define IQ4_VALUES 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
// The doubled values of the FP4 codes E2M1, + 12.
#define FP4_VALUES 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

// A cell of a rounded row: x is about factor * codes. `sums` has the sum of the codes of each half;
// `code_sum` is the factor times the sum of all codes.
typedef struct {
    int8_t codes[CELL];
    float factor, code_sum;
    int32_t sums[2];
} coded;

// A panel: the codes of all cells, then their scales.
INLINE long cell_bytes(form f) { return f.bits * CODE_BYTES; }
INLINE int has_offsets(form f) { return f.scales == DM || f.scales == SIXES || f.scales == FOURS; }
INLINE int halves_of(form f) { return f.scales >= HALVES ? 2 : 1; }
INLINE long super_bytes(form f) { return f.scales < SIXES ? 0 : has_offsets(f) ? 4 * LANES : 2 * LANES; }
INLINE long scale_bytes(form f) { return f.scales == DM ? 4 * LANES : f.scales == POWER || f.scales == SIGNED ? LANES : 2 * LANES; }
INLINE long scales_at(form f, long cell) {
    return cell * scale_bytes(f) + (f.scales < SIXES ? 0 : (cell / SUPER_CELLS + 1) * super_bytes(f));
}
INLINE long block_panel_bytes(form f, long in) {
    const long cells = in / CELL, supers = f.scales < SIXES ? 0 : cells / SUPER_CELLS;
    return rounded(cells * (cell_bytes(f) + scale_bytes(f)) + supers * super_bytes(f), 64);
}

typedef struct {
    vec s[2], m[2];  // s[1] and m[1] are those of a cell's upper half
} scale;

INLINE scale scale_of(form f, const char *at, long cell) {
    const char *own = at + scales_at(f, cell);
    const char *super = own - cell % SUPER_CELLS * scale_bytes(f) - super_bytes(f);
    scale result = {{{0}}, {{0}}};
    if (f.scales == D) result.s[0] = from_halves(own);
    else if (f.scales == DM) {
        result.s[0] = from_halves(own), result.m[0] = from_halves(own + 2 * LANES);
    } else if (f.scales == POWER) {  // two factors: the product may be subnormal
        const ints power = __builtin_convertvector(*(const bytes_at *)own, ints);
        result.s[0] = (vec)((power / 2 + 63) << 23) * (vec)((power - power / 2 + 63) << 23);
    } else if (f.scales == SIXES) {
        const ints six = __builtin_convertvector(*(const bytes_at *)own, ints);
        const ints less = __builtin_convertvector(*(const bytes_at *)(own + LANES), ints);
        result.s[0] = from_halves(super) * __builtin_convertvector(six, vec);
        result.m[0] = -(from_halves(super + 2 * LANES) * __builtin_convertvector(less, vec));
    } else if (f.scales == FOURS)
        for (int h = 0; h < 2; h++) {
            const ints both = __builtin_convertvector(*(const bytes_at *)(own + h * LANES), ints);
            result.s[h] = from_halves(super) * __builtin_convertvector(both & 15, vec);
            result.m[h] = -(from_halves(super + 2 * LANES) * __builtin_convertvector(both >> 4, vec));
        }
    else
        for (int h = 0; h < halves_of(f); h++) {
            const ints by = __builtin_convertvector(*(const chars_at *)(own + h * LANES), ints);
            result.s[h] = from_halves(super) * __builtin_convertvector(by, vec);
        }
    if (halves_of(f) == 1) result.s[1] = result.s[0], result.m[1] = result.m[0];
    return result;
}

INLINE ints look_up_codes(ints codes, int number) {
    static const uint8_t tables[2][16] __attribute__((aligned(16))) = {{IQ4_VALUES}, {FP4_VALUES}};
    const uint8_t *table = tables[number - 1];
#if LANES == 16 && defined(__AVX512BW__)
    const __m512i all_of = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)table));
    return (ints)_mm512_shuffle_epi8(all_of, (__m512i)codes);
#elif LANES == 8
    const __m256i all_of = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table));
    return (ints)_mm256_shuffle_epi8(all_of, (__m256i)codes);
#else
    uint8_t each[CODE_BYTES];
    memcpy(each, &codes, sizeof each);
    for (int i = 0; i < CODE_BYTES; i++) each[i] = table[each[i]];
    memcpy(&codes, each, sizeof each);
    return codes;
#endif
}

// Unpacks the codes of a cell: vector v has columns 4 v to 4 v + 3 of each output.
INLINE void unpack(form f, const char *at, ints codes[8]) {
    if (f.bits == 8) {
        UNROLLED for (int v = 0; v < 8; v++) codes[v] = *(const ints *)(at + v * CODE_BYTES);
        return;
    }
    const int low = f.bits < 4 ? 2 : 4;  // bits of a code in the first vectors
    UNROLLED for (int v = 0; v < 8; v++) {
        const pairs all_of = *(const pairs *)(at + (low == 2 ? v / 4 : v % 4) * CODE_BYTES);
        codes[v] = low == 2 ? (ints)(all_of >> v % 4 * 2 & 0x03030303)
                            : (ints)(all_of >> v / 4 * 4 & 0x0f0f0f0f);
    }
    const char *more = at + low * CODE_BYTES;
    if (f.bits == low + 1) {  // bit v of a byte is the last bit of a code in vector v
        const pairs last = *(const pairs *)more;
        UNROLLED for (int v = 0; v < 8; v++)
            codes[v] |= (ints)((v < low ? last << (low - v) : last >> (v - low)) & 0x01010101u << low);
    }
    if (f.bits == 6)  // two bits of vectors 0 to 3, then of the others
        UNROLLED for (int v = 0; v < 8; v++) {
            const pairs upper = *(const pairs *)(more + v / 4 * CODE_BYTES);
            const int at_bit = v % 4 * 2;
            codes[v] |= (ints)((at_bit <= 4 ? upper << (4 - at_bit) : upper >> 2) & 0x30303030);
        }
    if (f.table) UNROLLED for (int v = 0; v < 8; v++) codes[v] = look_up_codes(codes[v], f.table);
}

#if LANES == 16
#define WORDS(NAME) _mm512_##NAME
typedef __m512i words;
#elif LANES == 8
#define WORDS(NAME) _mm256_##NAME
typedef __m256i words;
#elif defined(__SSE2__)
#define WORDS(NAME) _mm_##NAME
typedef __m128i words;
#endif

// Adds to each sum the products of 4 codes with 4 values.
INLINE ints dot4(ints sum, ints codes, int32_t values, int bits) {
    (void)bits;
    const ints each = values - (ints){0};
#if LANES == 16 && defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)each);
#elif LANES == 8 && defined(__AVXVNNI__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)each);
#elif defined(WORDS)
    const words c = (words)codes, x = (words)each;
#if LANES >= 8
    if (bits < 8) {  // two products of 63 * 127 fit into 16 bits
        const words two = WORDS(maddubs_epi16)(c, x);
        return sum + (ints)WORDS(madd_epi16)(two, WORDS(set1_epi16)(1));
    }
#endif
    const words even = c & WORDS(set1_epi16)(255), odd = WORDS(srli_epi16)(c, 8);
    const words x_even = WORDS(srai_epi16)(WORDS(slli_epi16)(x, 8), 8);
    return sum + (ints)WORDS(madd_epi16)(even, x_even) +
           (ints)WORDS(madd_epi16)(odd, WORDS(srai_epi16)(x, 8));
#elif LANES == 4 && defined(__ARM_FEATURE_MATMUL_INT8)
    return (ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)each);
#elif LANES == 4 && defined(__aarch64__)
    const uint16x8_t c = (uint16x8_t)codes;
    const int16x8_t x = (int16x8_t)each;  // a product of 255 * 127 fits into 16 bits
    const int16x8_t even = (int16x8_t)(c & 255) * (x << 8 >> 8), odd = (int16x8_t)(c >> 8) * (x >> 8);
    return (ints)vpadalq_s16(vpadalq_s16((int32x4_t)sum, even), odd);
#else
    (void)each;
    const pairs c = (pairs)codes;
    UNROLLED for (int i = 0; i < 4; i++)
        sum += (ints)(c >> (8 * i) & 255) * (int8_t)(values >> (8 * i));
    return sum;
#endif
}

// Multiplies `rows` rows, `stride` bytes apart, by a panel. With `ahead`, prefetches the bytes that
// follow; only the first rows need this. Inlined: form and number of rows are constants.
INLINE void multiply_cells(const char *panel, long in, form f, const char *x, long stride,
                           int ahead, int rows, vec *to) {
    const long count = in / CELL, whole = cell_bytes(f) + scale_bytes(f);
    const char *scales = panel + count * cell_bytes(f);
    vec sums[ROWS];
    UNROLLED for (int r = 0; r < rows; r++) sums[r] = (vec){0};
    for (long cell = 0; cell < count; cell++) {
        const char *at = panel + cell * cell_bytes(f);
        if (ahead)
            for (long line = 0; line < whole; line += 64)
                __builtin_prefetch(panel + BLOCKS_AHEAD + cell * whole + line, 0, 2);
        ints codes[8];
        unpack(f, at, codes);
        const scale by = scale_of(f, scales, cell);
        UNROLLED for (int r = 0; r < rows; r++) {
            const coded *row = (const coded *)(x + r * stride) + cell;
            const int halves = halves_of(f);
            UNROLLED for (int h = 0; h < halves; h++) {
                const int32_t all_codes = halves == 2 ? row->sums[h] : row->sums[0] + row->sums[1];
                ints product = (f.offset ? -f.offset * all_codes : 0) - (ints){0};
                UNROLLED for (int v = 0; v < 8 / halves; v++) {
                    int32_t four;
                    memcpy(&four, row->codes + (h * 4 + v) * 4, 4);
                    product = dot4(product, codes[h * 4 + v], four, f.table == 1 ? 8 : f.bits);
                }
                sums[r] += by.s[h] * all(row->factor) * __builtin_convertvector(product, vec);
                if (f.scales == FOURS) sums[r] += by.m[h] * all(row->factor * (float)all_codes);
            }
            if (has_offsets(f) && halves == 1) sums[r] += by.m[0] * all(row->code_sum);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++) to[r] = sums[r];
}

// Rounds a row of `in` floats, a multiple of CELL. A cell becomes codes in [-127, 127] times a
// scale, which is NaN if a value of the cell is not finite.
static void encode(const float *x, long in, coded *to) {
    const vec shift = all(12582912.0f);  // 1.5 * 2^23: floats above it are the integers
    for (long cell = 0; cell < in / CELL; cell++, x += CELL, to++) {
        vec largest = {0}, wrong = {0};
        for (int k = 0; k < CELL; k += LANES) {
            const vec each = load(x + k);
            largest = larger((vec)((ints)each & 0x7fffffff), largest);
            wrong += each * all(0);
        }
        float magnitude = 0, none = 0;  // `none` is 0, or NaN if a value is not finite
        for (int i = 0; i < LANES; i++)
            magnitude = largest[i] > magnitude ? largest[i] : magnitude, none += wrong[i];
        const float inverse = magnitude > 0 ? 127 / magnitude : 0;
        ints sums[2] = {{0}, {0}};
        for (int k = 0; k < CELL; k += LANES) {
            const ints code = (ints)(load(x + k) * all(inverse) + shift) - (ints)shift;
            *(chars_at *)(to->codes + k) = __builtin_convertvector(code, chars_at);
            if (LANES <= 16) sums[k / 16] += (ints)((pairs)code << 24) >> 24;  // int8, even of NaN
        }
        for (int h = 0; h < 2; h++) {
            to->sums[h] = 0;
            for (int i = 0; i < LANES; i++) to->sums[h] += sums[h][i];
        }
        to->factor = magnitude / 127 + none;
        to->code_sum = to->factor * (float)(to->sums[0] + to->sums[1]);
    }
}

// ---- repacking of a file's blocks --------------------------------------------------------------

typedef struct {
    uint8_t codes[CELL], scales[2];
    uint16_t d, m;  // fp16
} decoded;

INLINE uint16_t half_at(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

INLINE void nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < CELL / 2; i++) codes[i] = from[i] & 15, codes[i + CELL / 2] = from[i] >> 4;
}

INLINE void fifths(const uint8_t *from, uint8_t *codes) {  // one bit per code
    for (int i = 0; i < CELL; i++) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

// Reads scale and offset number `at` of 8: 6 bits each, in 12 bytes.
INLINE void sixes(const uint8_t *from, int at, uint8_t *scales) {
    if (at < 4) scales[0] = from[at] & 63, scales[1] = from[at + 4] & 63;
    else {
        scales[0] = (from[at + 4] & 15) | from[at - 4] >> 6 << 4;
        scales[1] = from[at + 4] >> 4 | from[at] >> 6 << 4;
    }
}

INLINE long block_bytes(int type) {
    switch (type) {
    case Q4_0: case IQ4_NL: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q2_K: return 84;
    case Q3_K: return 110;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case IQ4_XS: return 136;
    case MXFP4: return 17;
    default: return 0;
    }
}

// Decodes cell `at` of a block, whose layout is ggml's (ggml-common.h).
static void decode_cell(int type, const uint8_t *b, int at, decoded *to) {
    to->d = half_at(b);
    switch (type) {
    case Q4_0: case IQ4_NL: nibbles(b + 2, to->codes); return;
    case Q4_1: to->m = half_at(b + 2), nibbles(b + 4, to->codes); return;
    case Q5_0: nibbles(b + 6, to->codes), fifths(b + 2, to->codes); return;
    case Q5_1: to->m = half_at(b + 2), nibbles(b + 8, to->codes), fifths(b + 4, to->codes); return;
    case Q8_0:
        for (int i = 0; i < CELL; i++) to->codes[i] = b[2 + i] ^ 128;
        return;
    case Q2_K:
        to->d = half_at(b + 80), to->m = half_at(b + 82);
        memcpy(to->scales, b + at * 2, 2);
        for (int i = 0; i < CELL; i++) to->codes[i] = b[16 + at / 4 * CELL + i] >> at % 4 * 2 & 3;
        return;
    case Q3_K:
        to->d = half_at(b + 108);
        for (int i = 0; i < CELL; i++)
            to->codes[i] = (b[32 + at / 4 * CELL + i] >> at % 4 * 2 & 3) | (b[i] >> at & 1) << 2;
        for (int h = 0; h < 2; h++) {  // 16 scales of 6 bits: the low 4 bits of all, then the others
            const int n = at * 2 + h;
            const uint8_t low = b[96 + n % 8] >> n / 8 * 4 & 15, high = b[104 + n % 4] >> n / 4 * 2 & 3;
            to->scales[h] = (uint8_t)((low | high << 4) - 32);
        }
        return;
    case Q4_K: case Q5_K: {
        const uint8_t *low = b + (type == Q4_K ? 16 : 48) + at / 2 * CELL;
        to->m = half_at(b + 2);
        sixes(b + 4, at, to->scales);
        for (int i = 0; i < CELL; i++) {
            to->codes[i] = at % 2 ? low[i] >> 4 : low[i] & 15;
            if (type == Q5_K) to->codes[i] |= (b[16 + i] >> at & 1) << 4;
        }
        return;
    }
    case Q6_K: {
        const uint8_t *low = b + at / 4 * 64 + at % 2 * CELL, *high = b + 128 + at / 4 * CELL;
        to->d = half_at(b + 208);
        memcpy(to->scales, b + 192 + at * 2, 2);
        for (int i = 0; i < CELL; i++)
            to->codes[i] = (at % 4 < 2 ? low[i] & 15 : low[i] >> 4) |
                           (high[i] >> at % 4 * 2 & 3) << 4;
        return;
    }
    case IQ4_XS:
        to->scales[0] = (uint8_t)((b[4 + at / 2] >> at % 2 * 4 & 15) +
                                  ((half_at(b + 2) >> at * 2 & 3) << 4) - 32);
        nibbles(b + 8 + at * CELL / 2, to->codes);
        return;
    case MXFP4: to->scales[0] = b[0], nibbles(b + 1, to->codes);
    }
}

// Writes the codes of a cell of output `lane`, in the layout that `unpack` reads.
static void write_codes(form f, const decoded *from, long lane, char *to) {
    uint32_t each[8], last = 0, twos[2] = {0};
    memcpy(each, from->codes, sizeof each);
    to += lane * 4;
    for (int v = 0; v < 8; v++) {
        const uint32_t halves = (each[v] & 0x0f0f0f0fu) | (each[(v + 4) % 8] & 0x0f0f0f0fu) << 4;
        if (f.bits == 8) memcpy(to + v * CODE_BYTES, each + v, 4);
        else if (v < 4 && f.bits >= 4) memcpy(to + v * CODE_BYTES, &halves, 4);
        last |= (each[v] >> (f.bits - 1) & 0x01010101u) << v;
        twos[v / 4] |= (each[v] >> (f.bits == 6 ? 4 : 0) & 0x03030303u) << v % 4 * 2;
    }
    if (f.bits < 4 || f.bits == 6)
        for (int i = 0; i < 2; i++) memcpy(to + ((f.bits == 6 ? 4 : 0) + i) * CODE_BYTES, twos + i, 4);
    if (f.bits == 3 || f.bits == 5) memcpy(to + (f.bits - 1) * CODE_BYTES, &last, 4);
}

static void write_scales(form f, const decoded *from, long cell, long lane, char *at) {
    char *own = at + scales_at(f, cell);
    char *super = own - cell % SUPER_CELLS * scale_bytes(f) - super_bytes(f);
    char *halves = f.scales < SIXES ? own : super;
    if (f.scales != POWER) memcpy(halves + lane * 2, &from->d, 2);
    if (has_offsets(f)) memcpy(halves + (LANES + lane) * 2, &from->m, 2);
    if (f.scales >= POWER) own[lane] = (char)from->scales[0];
    if (f.scales == SIXES || f.scales >= HALVES) own[LANES + lane] = (char)from->scales[1];
}

// Repacks the outputs of a panel from blocks [out, in] of a type; outputs beyond `out` are zeros.
static void repack(int type, const uint8_t *blocks, long out, long in, long panel, char *to) {
    const form f = form_of(type);
    const long per = f.scales < SIXES ? 1 : SUPER_CELLS, row_bytes = in / CELL / per * block_bytes(type);
    for (long lane = 0; lane < LANES; lane++) {
        const long row = panel * LANES + lane;
        for (long cell = 0; cell < in / CELL; cell++) {
            decoded each = {{0}, {0}, 0, 0};
            if (row < out)
                decode_cell(type, blocks + row * row_bytes + cell / per * block_bytes(type),
                            (int)(cell % per), &each);
            write_codes(f, &each, lane, to + cell * cell_bytes(f));
            write_scales(f, &each, cell, lane, to + in / CELL * cell_bytes(f));
        }
    }
}

// Writes row `lane` of a panel as floats.
static void decode_row(int type, const char *panel, long in, long lane, float *to) {
    const form f = form_of(type);
    for (long cell = 0; cell < in / CELL; cell++) {
        ints codes[8];
        unpack(f, panel + cell * cell_bytes(f), codes);
        const scale by = scale_of(f, panel + in / CELL * cell_bytes(f), cell);
        for (int k = 0; k < CELL; k++) {
            const uint8_t code = ((const uint8_t *)&codes[k / 4])[lane * 4 + k % 4];
            to[cell * CELL + k] = by.s[k / 16][lane] * (float)(code - f.offset) + by.m[k / 16][lane];
        }
    }
}
