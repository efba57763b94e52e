"""The one-command GPU run: correctness of the compiled kernels, their speed against what the device
can do, a sweep of tiles, and the engine against its roofline.

    python -m bench.gpu --out DIR

`limits` is what is measured and the arithmetic; a section is a list of cells (`cells`), each
of which leaves a row in a file before the next begins; `supervise` runs sections in processes of
their own, so that a kernel that faults costs its own row and no other.
"""
