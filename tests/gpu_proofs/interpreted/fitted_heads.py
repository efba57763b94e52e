"""Heads for both executors, fitted to the output of a tiny target so that drafts are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.core.request.request import Request
from cbatch.runtime.cpu.drafters.kinds import HEADS
from cbatch.runtime.drafting.heads.trial import fresh_kv, read_states, whole_text
from cbatch.runtime.gpu import heads
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights
from tests.gpu_proofs.interpreted.twins import Pair
from tests.runtime import made_heads
from tests.runtime.engines import VOCAB, NoisyWeights, run_engine


class HeadPair:
    """A head for either executor, from one folder. `rows` replace the target's own head."""

    def __init__(self, folder: Path, target: Pair, rows: Tensor | None = None) -> None:
        weights = HeadWeights.of(folder)
        config = read_head(folder, target.config)[0]
        if rows is None:
            rows = NoisyWeights(1).get("lm_head.weight", (VOCAB, made_heads.HIDDEN))
        self.model: Any = HEADS[config.kind](config, weights, target.model, rows)
        self.decoder: Any = heads.CLASSES[config.kind](config, weights, target.decoder, rows)
        self.config = self.model.config


def eagle3(
    folder: Path, target: Pair, texts: list[Request] | list[list[int]], **flags: bool
) -> HeadPair:
    """Fit an EAGLE-3 head that drafts only some ids."""
    tensors = made_heads.eagle3_tensors(drafts=VOCAB)
    config = made_heads.eagle3_config(draft_vocab_size=VOCAB, **flags)
    whole = HeadPair(made_heads.write_head(folder, config, tensors), target)
    norm = None if flags.get("norm_output") else tensors["norm.weight"]
    rows = _fit(_examples_after(whole, target, texts, norm))[made_heads.draft_ids()]
    tensors = made_heads.eagle3_tensors() | {"lm_head.weight": rows}
    folder = made_heads.write_head(folder, made_heads.eagle3_config(**flags), tensors)
    return HeadPair(folder, target)


def eagle1(folder: Path, target: Pair, texts: list[Request] | list[list[int]]) -> HeadPair:
    made_heads.write_head(folder, made_heads.llama_fields(), made_heads.eagle1_tensors())
    rows = _fit(_examples_after(HeadPair(folder, target), target, texts, None))
    return HeadPair(folder, target, rows)


def medusa(folder: Path, target: Pair, texts: list[Request] | list[list[int]]) -> HeadPair:
    tensors, config = made_heads.medusa_tensors(), made_heads.medusa_config()
    head = HeadPair(made_heads.write_head(folder, config, tensors), target).model
    for i in range(head.head.num_heads):
        examples = []
        for text in _texts(target, texts):
            chosen, states = _of_target(head, target, text)
            examples.append((head.refine(i, states)[: len(text) - 1 - i], chosen[1 + i :]))
        tensors[f"{i}.1.weight"] = _fit(examples)
    return HeadPair(made_heads.write_head(folder, config, tensors), target)


def _texts(target: Pair, sources: list[Request] | list[list[int]]) -> list[list[int]]:
    """Return texts unchanged, and requests as prompts with their outputs."""
    requests = [each for each in sources if isinstance(each, Request)]
    outputs = run_engine(requests, target.model).outputs if requests else {}
    texts = [each for each in sources if not isinstance(each, Request)]
    return texts + [[*map(int, r.prompt), *outputs[r.request_id]] for r in requests]


def _of_target(head: Any, target: Pair, text: list[int]) -> tuple[Tensor, Tensor]:
    """Return the target's choice after each token, and the states that a head reads there."""
    chosen, hidden = read_states(target.model, head.head.hidden_layers, torch.tensor(text))
    target.model.keep_hidden(())
    return chosen, head.fuse(hidden)


def _examples_after(
    pair: HeadPair,
    target: Pair,
    texts: list[Request] | list[list[int]],
    norm: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """Return an EAGLE head's output for each token, and the target's choice after it."""
    examples, head = [], pair.model
    for text in _texts(target, texts):
        ids = torch.tensor(text)
        chosen, states = _of_target(head, target, text)
        made = head.choices(whole_text(ids), fresh_kv(head, len(ids)), states.roll(1, 0))[1]
        if norm is not None:
            made = F.rms_norm(made, (made_heads.HIDDEN,), norm, made_heads.EPS)
        examples.append((made[1:], chosen[1:]))
    return examples


def _fit(examples: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return rows [vocab, hidden] of a head that predicts the tokens after these states, by least
    squares."""
    x, ids = (torch.cat(each) for each in zip(*examples, strict=True))
    targets = F.one_hot(ids, VOCAB).float() - 1 / VOCAB
    gram = x.T @ x + 1e-2 * torch.eye(x.shape[1])
    return torch.linalg.solve(gram, x.T @ targets).T.contiguous() * 20
