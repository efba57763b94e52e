"""The one-command GPU run: the engine against its roofline and whole vLLM, correctness of the
compiled kernels, their speed against what the device can do, and a sweep of tiles.

    python -m bench.gpu --out DIR

`limits` is what is measured and the arithmetic; a section is a list of cells (`cells`), each
of which leaves a row in a file before the next begins; `run` gives each section a process of
its own, so that a kernel that faults costs its own row and no other; `turns` lets one process
measure at a time.
"""
