"""Measurements on a GPU in one command: the engine compared with its roofline and with vLLM,
correctness and speed of the compiled kernels, and a search for attention tiles.

    python -m bench.gpu --out DIR

`limits` has the workloads and computes their lower time limits. A section is a list of
cells (`cells`), each of which leaves a row in a file before the next begins. `run` gives each
section a process of its own, so a kernel that faults loses only its own row. `turns` lets one
process measure at a time.
"""
