// Computes products on a processor that Python does not run on: reads problems from stdin and
// writes outputs to stdout. A problem is {type, out, in, rows, bytes of weights}, weights and rows.
// Weights are panels (F32 and BF16), or blocks as in a file.

#include "library.c"

#include <stdio.h>

static void *filled(long bytes) {
    void *to = aligned_alloc(64, rounded(bytes, 64));
    if (!to || fread(to, 1, bytes, stdin) != (size_t)bytes) exit(1);
    return to;
}

int main(void) {
    long head[5];
    while (fread(head, sizeof head, 1, stdin)) {
        const long type = head[0], out = head[1], in = head[2], rows = head[3];
        const int blocks = form_of((int)type).bits > 0;
        char *panels = filled(head[4]);
        const float *x = filled(rows * in * 4);
        float *y = malloc(rows * out * sizeof *y);
        if (blocks) {
            const uint8_t *blocks_of_file = (uint8_t *)panels;
            panels = aligned_alloc(64, rounded(out, LANES) / LANES * bytes_of_panel((int)type, in));
            pack((int)type, blocks_of_file, out, in, panels, 2);
        }
        const segment part = {panels, out, out, out, 0, (int)type};
        const linear by = {.parts = &part, .num_parts = 1, .in = in};
        if (product(&by, x, y, rows, out, 2)) return 1;
        fwrite(y, sizeof *y, rows * out, stdout);
    }
    return 0;
}
