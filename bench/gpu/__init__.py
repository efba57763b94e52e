"""Measurements on a GPU in one command: the engine compared with its roofline and with vLLM,
correctness and speed of the compiled kernels, and a search for attention tiles.

    python -m bench.gpu --out DIR

A section is a list of cells. Each cell leaves a row in DIR/results.json before the next begins.
"""
