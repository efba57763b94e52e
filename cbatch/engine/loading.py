"""Load an engine's target and draft on their device, and start the other ranks."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor, WatchedExecutor
from cbatch.engine.backends import backend_of, default_device
from cbatch.engine.model_impl import ModelFiles, require_head_support
from cbatch.engine.options import EngineOptions
from cbatch.engine.prices.startup import max_drafts
from cbatch.engine.ranks.executor import RankedExecutor
from cbatch.engine.ranks.group import Ranks
from cbatch.engine.ranks.messages import LOADED, Probe, Serve
from cbatch.grammars import Grammars
from cbatch.runtime.backend import (
    Backend,
    Impl,
    LoadedModels,
    LoadRequest,
    Requirements,
    TrialTexts,
)
from cbatch.runtime.model.head_config import is_head
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


class Loaded(NamedTuple):
    """Loaded models and their backend. `ranks`: the other tensor-parallel ranks, if any."""

    backend: Backend
    models: LoadedModels
    ranks: Ranks | None

    def executor(
        self, config: SchedulerConfig, grammars: Grammars | None, default_params: SamplingParams
    ) -> Executor:
        """Create the executor, which runs every plan on all ranks."""
        executor = self.models.executor(config, max_drafts(config), grammars, default_params)
        if self.ranks is None:
            return executor
        assert isinstance(executor, WatchedExecutor)
        with self.ranks.on_all_ranks(Serve(config)):
            return RankedExecutor(executor, self.ranks)

    def batch_invariance(self) -> tuple[bool, str]:
        """Run the test for batch invariance on all ranks."""
        with nullcontext() if self.ranks is None else self.ranks.on_all_ranks(Probe()):
            return self.models.batch_invariance()


def load_models(
    opened: ExitStack,
    model: str | Path,
    draft: str | Path | None,
    files: tuple[ModelFiles, ModelFiles | None],
    options: EngineOptions,
    tokenizer: TextTokenizer | None,
) -> Loaded:
    """Load the models of an engine, and start its other ranks, which `opened` will close. `files`
    belong to model and draft. Raises `FieldError` if the device does not support the options."""
    impls: tuple[Impl, Impl]
    impls = files[0].impl, "own" if files[1] is None else files[1].impl
    needs = Requirements(
        model=model,
        impls=impls,
        numerics=options.numerics,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    head = None if files[1] is None or not is_head(files[1].path) else files[1].path
    require_head_support(impls[0], head=head)
    device = default_device(needs) if options.device == "auto" else options.device
    backend = backend_of(device)
    backend.check_supported(needs)
    backend.require_device(device)
    backend.set_threads(options.threads, options.tensor_parallel_size)
    request = LoadRequest(
        device=device,
        model=model,
        draft=head or draft,
        impls=impls,
        trial_texts=() if head is None else _trial_texts(model, tokenizer),
        dtype=options.dtype,
        numerics=options.numerics,
        kv_cache_dtype=options.kv_cache_dtype,
        random_weights_seed=options.random_weights_seed,
    )
    if options.tensor_parallel_size == 1:
        return Loaded(backend, backend.load(request), None)
    ranks = Ranks(options.tensor_parallel_size, request, options.tokenizer)
    opened.callback(ranks.close)
    models = backend.load(request, ranks.group)
    ranks.expect_answer(LOADED)
    return Loaded(backend, models, ranks)


def _trial_texts(model: str | Path, tokenizer: TextTokenizer | None) -> TrialTexts:
    """Return the token ids of the trial texts for a head."""
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory

    return trial_texts(read_config(resolve_directory(model, weights=False)).vocab_size, tokenizer)
