"""Loading of a draft head with a trial on a few texts, which rejects a head of another model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.engine.backends import is_gpu

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel
    from cbatch.runtime.drafting.heads.head import Head
    from cbatch.text import TextTokenizer

_logger = logging.getLogger("cbatch")

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
_MADE_UP_TOKENS = 256
TrialTexts = tuple[tuple[int, ...], ...]  # token ids of the texts that a head is tried on


def take_head(path: Path, target: AnyModel, target_path: str | Path, texts: TrialTexts) -> Head:
    """Load a head in the reading of its files that predicts the target best on `texts`. With tensor
    parallelism all ranks must call it. Raises ModelError for a file that does not fit the model,
    FieldError for a head that is no better than always guessing one token."""
    from cbatch.runtime.drafting.heads.loading import load_heads
    from cbatch.runtime.drafting.heads.trial import best_reading

    tried: Any = target
    heads: list[Head]
    if is_gpu(str(target.device)):
        from cbatch.runtime.gpu.heads import CLASSES
        from cbatch.runtime.gpu.one_call import OneCall

        tried, heads = OneCall(target), load_heads(path, target, target_path, CLASSES)
    else:
        from cbatch.runtime.cpu.drafters.kinds import HEADS

        heads = load_heads(path, target, target_path, HEADS)
    best = best_reading(heads, tried, texts)
    summary = f"draft {path}: {best.head.head}; {best.agreement:.0%} of {best.trials} first "
    summary += "drafts are the model's own choice"
    if best.guesses:
        problem = f"{summary}, no more than always guessing the same token ({best.chance:.0%})"
        raise FieldError("draft", problem, "use a head that was trained for this model")
    _logger.info("%s", summary)
    return best.head


def trial_texts(vocab_size: int, tokenizer: TextTokenizer | None) -> TrialTexts:
    """Return the token ids of the trial texts; without a tokenizer one text of random tokens."""
    if tokenizer is None:
        tokens = np.random.default_rng(0).integers(0, vocab_size, _MADE_UP_TOKENS)
        return (tuple(tokens.tolist()),)
    return tuple(tuple(i for i in tokenizer.encode(text) if i < vocab_size) for text in _TEXTS)
