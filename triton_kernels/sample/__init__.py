"""Tokens from logits, without sorting and without a tensor of probabilities.

`rows` says what a caller hands over. `stats` reads every logit once; `settle` makes winners, masses
and cuts (`cut`) of what it leaves; both look at logits through `tiles`. `launch` runs them, and
`reference` does the same in plain torch.
"""
