"""Trial texts: a draft head is tested on them, to reject a head of another model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cbatch.runtime.backend import TrialTexts

if TYPE_CHECKING:
    from cbatch.text import TextTokenizer


_TEXTS = (
    "The water cycle describes how water moves through the air, the land and the sea. "
    "The sun heats the sea, and some of the water evaporates. The vapour rises, cools "
    "down, and forms clouds. When the drops in a cloud get too heavy, they fall as rain "
    "or snow, and the water flows back.",
    "def mean(values):\n    total = 0.0\n    count = 0\n    for value in values:\n        "
    "total += value\n        count += 1\n    if count == 0:\n        raise "
    'ValueError("mean of nothing")\n    return total / count\n\n\nclass Stack:\n    def '
    "__init__(self):\n        self.items = []\n",
    "Once upon a time there was a small village at the foot of a mountain. Every morning "
    "the baker got up before the sun, lit the fire in his oven and made bread for "
    "everyone. One day a stranger came to the door and asked him for a loaf. He said "
    "that he had no money, but that he could tell a story.",
    "def read_settings(path):\n    settings = {}\n    with open(path) as file:\n        for "
    "line in file:\n            line = line.strip()\n            if not line or "
    'line.startswith("#"):\n                continue\n            key, _, value = '
    'line.partition("=")\n            settings[key.strip()] = value.strip()\n    return '
    "settings\n",
    "Question: What is the difference between a list and a tuple?\nAnswer: A list can be "
    "changed after it was made: items can be added, removed or replaced. A tuple cannot "
    "be changed. So a tuple can be the key of a dictionary, and a list cannot. Use a "
    "list where the number of items changes, and a tuple for a few values that belong "
    "together, such as a point with two coordinates.",
)
_NUM_RANDOM_TOKENS = 256  # length of the random text, if there is no tokenizer


def trial_texts(vocab_size: int, tokenizer: TextTokenizer | None) -> TrialTexts:
    """Return the token ids of the trial texts; without a tokenizer, one text of random tokens."""
    if tokenizer is None:
        tokens = np.random.default_rng(0).integers(0, vocab_size, _NUM_RANDOM_TOKENS)
        return (tuple(tokens.tolist()),)
    return tuple(tuple(i for i in tokenizer.encode(text) if i < vocab_size) for text in _TEXTS)
