// Lookup drafts, as cbatch/runtime/drafting defines them in Python. No state is kept between calls:
// reading a row's tokens costs a thousandth of attention over them.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Drafts continue an earlier match of the last `shortest` to `longest` tokens: the latest match, or
// with `by_frequency` the most frequent next tokens. The latter are at most spec_factor * matched
// tokens, with a probability of at least `min_probability`.
typedef struct {
    long shortest, longest, by_frequency;
    double spec_factor, min_probability;
} lookup;

typedef struct {
    int64_t token;
    long count;
} follower;

// Working memory of a call. `places` has the indices of the `count` tokens that follow a match, the
// last one first.
typedef struct {
    const lookup *of;
    long count, *places, *overlaps;
    int64_t *recent;
    follower *table;
} search;

enum { COMPARED_TOKENS = 16 };  // tokens compared at a time

// Returns the index after the last `token` in text [end], or 0 if there is none.
static long index_after_last(const int64_t *text, long end, int64_t token) {
    for (; end >= COMPARED_TOKENS; end -= COMPARED_TOKENS) {
        int64_t matches = 0;
        for (long i = 0; i < COMPARED_TOKENS; i++) matches |= text[end - 1 - i] == token;
        if (matches) break;
    }
    while (end > 0 && text[end - 1] != token) end--;
    return end;
}

// Finds the longest suffix of the `size` tokens before `end` that has a following token in text
// [length]. Returns its length, and leaves the indices of the following tokens in `places`: unless
// `all`, only the last one if all `size` tokens match. As in the Z algorithm (Gusfield 1997, 1.3)
// no token is read twice: text [low, high) is a suffix of the context, too, so matches inside it
// are known from the context's overlaps with itself.
static long find_followers(search *s, const int64_t *text, long length, const int64_t *end,
                           long size, int all) {
    long best = 1, low = length, high = length, count = 0, *const places = s->places;
    long *const overlaps = s->overlaps;
    for (long k = 1; k < size; k++) {
        long same = 0;
        while (same < size - k && end[-1 - k - same] == end[-1 - same]) same++;
        overlaps[k] = same;
    }
    for (long place = length - 1; place > 0; place--) {
        long same = 0;
        if (place > low) same = overlaps[high - place];
        else place = index_after_last(text, place, end[-1]);
        if (same >= place - low) {
            same = place > low ? place - low : 0;
            while (same < size && same < place && text[place - 1 - same] == end[-1 - same]) same++;
            low = place - same, high = place;
        }
        if (same > best) best = same, count = 0;
        if (same == best) places[count++] = place;
        if (same == size && !all) break;
    }
    s->count = count;
    return count ? best : 0;
}

// Returns the most frequent token at the places; the latest one, if several are as frequent.
static follower most_frequent(search *s, const int64_t *text) {
    uint64_t mask = 1;
    while (mask < 2 * (uint64_t)s->count) mask = 2 * mask + 1;
    memset(s->table, 0, (mask + 1) * sizeof *s->table);
    follower best = {0, 0};
    for (long i = s->count - 1; i >= 0; i--) {
        const int64_t token = text[s->places[i]];
        uint64_t at = ((uint64_t)token * 0x9E3779B97F4A7C15u >> 32) & mask;
        while (s->table[at].count && s->table[at].token != token) at = (at + 1) & mask;
        s->table[at].token = token;
        if (++s->table[at].count >= best.count) best = s->table[at];
    }
    return best;
}

// Drafts a continuation of text [length]; returns the number of drafts, at most `depth`.
static long guess(search *s, const int64_t *text, long length, long depth, int64_t *drafts) {
    const lookup *of = s->of;
    long size = length < of->longest ? length : of->longest;
    size = find_followers(s, text, length, text + length, size, of->by_frequency);
    const long matched = size;
    if (size < of->shortest) return 0;
    if (!of->by_frequency) {
        for (long i = 0, place = s->places[0]; i < depth; i++, place++)
            drafts[i] = place < length ? text[place] : drafts[place - length];
        return depth;
    }
    const double max_drafts = of->spec_factor * matched;
    if (max_drafts < depth) depth = (long)max_drafts;
    memcpy(s->recent, text + length - matched, matched * sizeof *text);
    double probability = 1;
    for (long i = 0; i < depth; i++) {
        if (i) {
            size = size < of->longest ? size + 1 : size;
            size = find_followers(s, text, length, s->recent + matched + i, size, 1);
        }
        const follower next = most_frequent(s, text);
        probability *= (double)next.count / s->count;
        if (probability < of->min_probability) return i;
        drafts[i] = s->recent[matched + i] = next.token;
    }
    return depth;
}

// Returns the start of the window before position `end`: of `half` to 2 * `half` tokens, or all.
static long window_start(long end, long half) {
    const long start = (end + half - 1) / half - 2;
    return start > 0 ? start * half : 0;
}

// Allocates memory for requests [rows, width].
static int allocate(search *s, const lookup *of, const int64_t *requests, long rows, long width,
                    long half) {
    long tokens = 0;
    for (const int64_t *row = requests; row < requests + rows * width; row += width) {
        const long length = row[1] < 2 * half ? row[1] : 2 * half;
        if (length > tokens) tokens = length;
    }
    const long table = 4 * tokens + 4, recent = of->longest + width;
    char *memory = malloc((tokens + of->longest) * sizeof(long) + recent * sizeof(int64_t) +
                          table * sizeof(follower));
    s->of = of, s->table = (follower *)memory, s->recent = (int64_t *)(s->table + table);
    s->places = (long *)(s->recent + recent), s->overlaps = s->places + tokens;
    return !memory;
}

// Each row of `requests` [rows] has a slot, the slot's number of known tokens, and the number of
// drafts to make. It gets the number of drafts made, then the drafts. tokens [slots, stride].
// Returns nonzero if memory runs out.
int look_up(const lookup *of, const int64_t *tokens, long stride, long half, int64_t *requests,
            long rows, long depth) {
    search s;
    if (allocate(&s, of, requests, rows, 4 + depth, half)) return 1;
    for (int64_t *row = requests; row < requests + rows * (4 + depth); row += 4 + depth) {
        const long start = window_start(row[1], half);
        row[3] = guess(&s, tokens + row[0] * stride + start, row[1] - start, row[2], row + 4);
    }
    free(s.table);
    return 0;
}
