"""Files of Medusa heads in all published layouts give the same numbers; other files are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import is_head, read_head
from tests.runtime.made_heads import (
    DRAFTS,
    HIDDEN,
    MedusaReference,
    draft_ids,
    medusa_config,
    medusa_tensors,
    write_head,
)
from tests.runtime.pairs import VOCAB, tiny_config, tiny_model
from tests.runtime.test_eagle import CLOSE, Cold, target_head
from tests.runtime.test_medusa import LAST, load_medusa

VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN}
VLLM |= {"vocab_size": VOCAB, "num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": True}

Tensors = dict[str, Tensor]


def by_vllm(tensors: Tensors, **head: Tensor) -> Tensors:
    """Return tensors under vLLM's names. `head` replaces the output matrices of all heads."""
    renamed = {}
    for name, tensor in tensors.items():
        number, block, *rest = name.split(".")
        if rest[0] == "linear":
            renamed[f"blocks.{number}.layers.{block}.{rest[1]}"] = tensor
        elif not head:
            renamed[f"lm_heads.{number}.weight"] = tensor
    return renamed | {f"{name}.weight": tensor for name, tensor in head.items()}


def with_heads(tensors: Tensors, rows: Tensor) -> Tensors:
    return {n: rows if n.endswith(".1.weight") else t for n, t in tensors.items()}


def without_heads(tensors: Tensors) -> Tensors:
    return {n: t for n, t in tensors.items() if "linear" in n}


TOKEN_MAP = {"truncated_vocab_size": DRAFTS, "original_lm_head": True}
# Configuration, the tensors of a file, and those of the equations.
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], Any]] = {
    "FasterDecoding": (medusa_config(), lambda t: t, lambda t: t),
    "fewer in the configuration": (medusa_config(medusa_num_heads=2), lambda t: t, lambda t: t),
    "of a state dict": (
        medusa_config(),
        lambda t: {f"medusa_head.{name}": tensor for name, tensor in t.items()},
        lambda t: t,
    ),
    "TGI, with the model's head": (
        medusa_config(), without_heads, lambda t: with_heads(t, target_head())
    ),
    "vLLM": (VLLM, by_vllm, lambda t: t),
    "vLLM, one head for all": (
        VLLM | {"original_lm_head": True},
        lambda t: by_vllm(t, lm_head=t["0.1.weight"]),
        lambda t: with_heads(t, t["0.1.weight"]),
    ),
    "vLLM, fewer ids": (
        VLLM | TOKEN_MAP,
        lambda t: {**by_vllm(t, lm_head=t["0.1.weight"][draft_ids()]), "token_map": draft_ids()},
        lambda t: with_heads(t, t["0.1.weight"]),
    ),
    "vLLM, ids of a whole head": (
        VLLM | TOKEN_MAP,
        lambda t: {**by_vllm(t, **{"lm_heads.0": t["0.1.weight"]}), "token_map": draft_ids()},
        lambda t: with_heads(t, t["0.1.weight"]),
    ),
}  # fmt: skip


def agree(folder: Path, expected: Tensors) -> None:
    """Compare all heads at every position of a text."""
    tokens = torch.randint(0, VOCAB, (9,)).tolist()
    head = load_medusa(folder, tiny_model())
    reference = MedusaReference(expected, tiny_model().final_norm)
    cold = Cold(reference, LAST)
    states = cold.states(tokens)
    rows = [torch.arange(len(tokens))] * head.head.num_heads
    assert head.head.num_heads == 4
    for drafts, own in enumerate(head.logits(head.fuse(states), rows)):
        for at in range(len(tokens) - 1):
            said = reference.logits(tokens[: at + 2], states, [0] * drafts)
            if head.vocabulary is not None:
                assert torch.isinf(own[at]).sum() == VOCAB - DRAFTS
                own_said, said = own[at, head.vocabulary], said[head.vocabulary]
            else:
                own_said = own[at]
            torch.testing.assert_close(own_said, said, **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_compute_what_the_equations_say_in_every_layout(layout, tmp_path):
    config, written, expected = LAYOUTS[layout]
    tensors = medusa_tensors()
    write_head(tmp_path, config, written(tensors))
    assert is_head(tmp_path)
    agree(tmp_path, expected(tensors))


def test_heads_of_several_blocks_and_of_a_pickle(tmp_path):
    tensors = medusa_tensors(blocks=3)
    write_head(tmp_path, medusa_config(medusa_num_layers=3), tensors)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert is_head(tmp_path) and read_head(tmp_path, tiny_config())[0].num_blocks == 3
    agree(tmp_path, tensors)


def changed(change: Callable[[Tensors], Any]) -> Tensors:
    tensors = medusa_tensors()
    change(tensors)
    return tensors


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "hidden size": (
        medusa_config(),
        changed(lambda t: t.update({"0.0.linear.weight": torch.zeros(48, 48)})),
        "tensor blocks.0.layers.0.weight has shape [48, 48], this model",
    ),
    "hidden size that is told": (
        VLLM | {"hidden_size": 48}, by_vllm(medusa_tensors()), "hidden_size: 48 is not"
    ),
    "vocabulary": (
        medusa_config(),
        changed(lambda t: t.update({"2.1.weight": torch.zeros(99, HIDDEN)})),
        "tensor lm_heads.2.weight has shape [99, 32]",
    ),
    "vocabulary that is told": (
        VLLM | {"vocab_size": 99}, by_vllm(medusa_tensors()), "vocab_size: 99 is not"
    ),
    "layers": (
        medusa_config(medusa_num_layers=2), medusa_tensors(),
        "medusa_num_layers: 2, the tensors have 1",
    ),
    "heads that are not there": (
        medusa_config(medusa_num_heads=5), medusa_tensors(),
        "medusa_num_heads: 5, the tensors have 4",
    ),
    "a tensor short": (
        medusa_config(), changed(lambda t: t.pop("1.0.linear.weight")),
        "tensor blocks.1.layers.0.weight is missing",
    ),
    "no block": (
        medusa_config(),
        {"0.1.weight": torch.zeros(VOCAB, HIDDEN)},
        "tensor blocks.0.layers.0.weight is missing",
    ),
    "NaN": (
        medusa_config(),
        changed(lambda t: t["3.0.linear.bias"].__setitem__(0, torch.nan)),
        "tensor blocks.3.layers.0.bias contains values that are not finite",
    ),
    "ids": (
        VLLM | TOKEN_MAP,
        {**by_vllm(medusa_tensors()), "token_map": torch.full((DRAFTS,), 3)},
        "tensor token_map gives ids twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case, tmp_path):
    config, tensors, message = REFUSED[case]
    write_head(tmp_path, config, tensors)
    assert is_head(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_medusa(tmp_path, tiny_model())
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("never.txt"),)


@pytest.mark.parametrize("save", [torch.save, lambda x, file: file.write_bytes(pickle.dumps(x))])
def test_code_in_a_pickle_is_not_run(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(medusa_config()))
    save({"0.0.linear.weight": _Code()}, tmp_path / "medusa_lm_head.pt")
    assert is_head(tmp_path)
    with pytest.raises(
        ModelError, match=r"medusa_lm_head\.pt: .*(code in a pickle|cannot be read)"
    ):
        read_head(tmp_path, tiny_config())
    assert not (tmp_path / "never.txt").exists()
