"""Tokens from logits, without sorting and without a tensor of probabilities.

`rows` says what a caller hands over; `stats`, `settle` and `launch` hold the kernels in the order in
which they run; `reference` does the same in plain torch. Only importing a kernel imports triton.
"""
