"""Files of heads in all published layouts give the same numbers; other files are refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import is_head, read_head
from cbatch.runtime.model.head_weights import HeadWeights
from tests.runtime.engines import VOCAB, tiny_config, tiny_model
from tests.runtime.made_heads import (
    CLOSE,
    DRAFTS,
    HIDDEN,
    LAYERS,
    Cold,
    MedusaReference,
    Reference,
    draft_ids,
    eagle1_tensors,
    eagle3_config,
    eagle3_tensors,
    embedding,
    llama_fields,
    medusa_config,
    medusa_tensors,
    target_head,
    write_head,
)
from tests.runtime.marks import needs_compiler
from tests.runtime.test_heads import load

pytestmark = needs_compiler

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]
# By layout: its configuration, the tensors of its file, and those of the equations.
Layouts = dict[str, tuple[dict[str, Any], Change, Any]]


def same(tensors: Tensors) -> Tensors:
    return tensors


# --- EAGLE-3 --------------------------------------------------------------------------------------

IDS = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}


def sglang_fields(ids: list[int]) -> dict[str, Any]:
    """Return the fields that SpecForge and SGLang write: their ids are those of the layer
    before."""
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    names = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}
    return {**llama_fields(), "draft_vocab_size": DRAFTS, **names}


def midlayer(tensors: Tensors) -> Tensors:
    return {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}


def with_norms(tensors: Tensors, **sizes: int) -> Tensors:
    generator = torch.Generator().manual_seed(2)
    norms = {f"{n}.weight": torch.rand(s, generator=generator) + 0.5 for n, s in sizes.items()}
    return tensors | norms


EAGLE_LAYOUTS: Layouts = {
    "speculators": (eagle3_config(), same, {}),
    "SafeAILab": ({**llama_fields(), "draft_vocab_size": DRAFTS, **IDS}, midlayer, {}),
    "SpecForge": (sglang_fields([-1, 0, 1]), midlayer, {}),
    "AngelSlim": (
        {**llama_fields(), "architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 80}
        | {"draft_vocab_size": DRAFTS, **IDS},
        midlayer,
        {},
    ),
    "normed residual": (
        eagle3_config(norm_before_residual=True), same, {"norm_before_residual": True}
    ),
    "normed output": (eagle3_config(norm_output=True), same, {"norm_output": True}),
    "a norm before fc": (eagle3_config(), lambda t: with_norms(t, input_norm=3 * HIDDEN), {}),
    "norms before fc": (
        eagle3_config(fc_norm=True),
        lambda t: with_norms(t, **{f"fc_norm.{i}": HIDDEN for i in range(3)}),
        {},
    ),
    "the target's rows": (
        eagle3_config(), lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"}, {}
    ),
}  # fmt: skip


def assert_eagle(folder: Path, tensors: Tensors, **flags: bool) -> None:
    """Compare the logits of the second draft after some tokens with those of the equations."""
    plain = {"lm_head.weight": target_head()[draft_ids()]}
    plain |= {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    tokens, head = torch.randint(0, VOCAB, (13,)).tolist(), load(folder, tiny_model())
    cold = Cold(Reference(plain, embedding(), **flags), head.head.hidden_layers)
    kv = KVCache(head.config, 64, 4, head.dtype, head.device)
    states = head.fuse(cold.states(tokens)).roll(1, 0)
    first, carried = head.forward(cold.batch(tokens), kv, states)
    draft = int(first[-1].argmax())
    second, _ = head.forward(cold.batch([draft], len(tokens)), kv, carried[-1:])
    own = second[-1] if head.vocabulary is None else second[-1][head.vocabulary]
    torch.testing.assert_close(own, cold.logits(tokens, [draft]), **CLOSE)


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_an_eagle_head_computes_what_the_equations_say_in_every_layout(layout, tmp_path):
    config, change, flags = EAGLE_LAYOUTS[layout]
    tensors = change(eagle3_tensors())
    write_head(tmp_path, config, tensors)
    assert is_head(tmp_path)
    assert_eagle(tmp_path, tensors, **flags)


def test_readings_are_what_frameworks_disagree_about(tmp_path):
    config = tiny_config()
    write_head(tmp_path, sglang_fields([0, 1]), eagle3_tensors())
    readings = read_head(tmp_path, config)
    assert [each.hidden_layers for each in readings] == [(1, 2), (0, 1), (1, 2), (0, 1)]
    assert [each.normed_residual for each in readings] == [False, False, True, True]
    write_head(tmp_path, eagle3_config(eagle_aux_hidden_state_layer_ids=[0, 2]), eagle3_tensors())
    assert [each.hidden_layers for each in read_head(tmp_path, config)] == [(0, 2)]
    write_head(tmp_path, llama_fields(), eagle1_tensors())
    (first,) = read_head(tmp_path, config)
    assert (first.kind, first.hidden_layers, first.fc_bias) == ("eagle", (2,), True)


# --- Medusa ---------------------------------------------------------------------------------------

VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN}
VLLM |= {"vocab_size": VOCAB, "num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": True}
TOKEN_MAP = {"truncated_vocab_size": DRAFTS, "original_lm_head": True}


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


def with_heads(tensors: Tensors, rows: Tensor | None = None) -> Tensors:
    rows = tensors["0.1.weight"] if rows is None else rows
    return {n: rows if n.endswith(".1.weight") else t for n, t in tensors.items()}


MEDUSA_LAYOUTS: Layouts = {
    "FasterDecoding": (medusa_config(), same, same),
    "fewer in the configuration": (medusa_config(medusa_num_heads=2), same, same),
    "of a state dict": (
        medusa_config(), lambda t: {f"medusa_head.{name}": x for name, x in t.items()}, same
    ),
    "TGI, with the model's head": (
        medusa_config(),
        lambda t: {n: x for n, x in t.items() if "linear" in n},
        lambda t: with_heads(t, target_head()),
    ),
    "vLLM": (VLLM, by_vllm, same),
    "vLLM, one head for all": (
        VLLM | {"original_lm_head": True},
        lambda t: by_vllm(t, lm_head=t["0.1.weight"]),
        with_heads,
    ),
    "vLLM, fewer ids": (
        VLLM | TOKEN_MAP,
        lambda t: {**by_vllm(t, lm_head=t["0.1.weight"][draft_ids()]), "token_map": draft_ids()},
        with_heads,
    ),
    "vLLM, ids of a whole head": (
        VLLM | TOKEN_MAP,
        lambda t: {**by_vllm(t, **{"lm_heads.0": t["0.1.weight"]}), "token_map": draft_ids()},
        with_heads,
    ),
}  # fmt: skip


def assert_medusa(folder: Path, expected: Tensors) -> None:
    """Compare all heads at every position of a text with the equations."""
    tokens = torch.randint(0, VOCAB, (9,)).tolist()
    head = load(folder, tiny_model())
    reference = MedusaReference(expected, tiny_model().final_norm)
    states = Cold(reference, (2,)).states(tokens)
    assert head.head.num_heads == 4
    rows = [torch.arange(len(tokens))] * 4
    for drafts, logits in enumerate(head.logits(head.fuse(states), rows)):
        for at in range(len(tokens) - 1):
            own, said = logits[at], reference.logits(tokens[: at + 2], states, [0] * drafts)
            if head.vocabulary is not None:
                assert torch.isinf(own).sum() == VOCAB - DRAFTS
                own, said = own[head.vocabulary], said[head.vocabulary]
            torch.testing.assert_close(own, said, **CLOSE)


@pytest.mark.parametrize("layout", MEDUSA_LAYOUTS)
def test_medusa_heads_compute_what_the_equations_say_in_every_layout(layout, tmp_path):
    config, written, expected = MEDUSA_LAYOUTS[layout]
    write_head(tmp_path, config, written(medusa_tensors()))
    assert is_head(tmp_path)
    assert_medusa(tmp_path, expected(medusa_tensors()))


# --- pickles --------------------------------------------------------------------------------------


def test_pickles_of_tensors_are_read(tmp_path):
    """The Medusa heads have several blocks."""
    write_head(tmp_path, eagle3_config(), eagle3_tensors())
    (tmp_path / "model.safetensors").unlink()
    torch.save(midlayer(eagle3_tensors()), tmp_path / "pytorch_model.bin")
    assert_eagle(tmp_path, eagle3_tensors())
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "config.json").write_text(json.dumps(medusa_config(medusa_num_layers=3)))
    tensors = medusa_tensors(blocks=3)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    assert is_head(tmp_path) and read_head(tmp_path, tiny_config())[0].num_blocks == 3
    assert_medusa(tmp_path, tensors)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("never.txt"),)


@pytest.mark.parametrize("save", [torch.save, lambda x, file: file.write_bytes(pickle.dumps(x))])
@pytest.mark.parametrize(
    ("name", "config"),
    [("pytorch_model.bin", eagle3_config()), ("medusa_lm_head.pt", medusa_config())],
)
def test_code_in_a_pickle_is_not_run(name, config, save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save({"fc.weight": _Code()}, tmp_path / name)
    assert is_head(tmp_path)
    with pytest.raises(ModelError, match=rf"{name}: .*(code in a pickle|cannot be read)"):
        HeadWeights.of(tmp_path)
    assert not (tmp_path / "never.txt").exists()


# --- what is refused ------------------------------------------------------------------------------


def eagle(change: Callable[[Tensors], Any] = same) -> Tensors:
    tensors = eagle3_tensors()
    change(tensors)
    return tensors


def heads(change: Callable[[Tensors], Any] = same) -> Tensors:
    tensors = medusa_tensors()
    change(tensors)
    return tensors


def llama_layer(**fields: int) -> dict[str, Any]:
    return eagle3_config(transformer_layer_config={**llama_fields(), **fields})


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "hidden size": (llama_layer(hidden_size=64), eagle(), "tensor fc.weight has shape"),
    "vocabulary": (
        llama_layer(vocab_size=99), eagle(), "vocab_size: 99 is not the target's vocabulary of 64"
    ),
    "draft vocabulary": (
        eagle3_config(draft_vocab_size=DRAFTS + 1), eagle(), "tensor d2t has shape"
    ),
    "ids": (
        eagle3_config(), eagle(lambda t: t["d2t"].__setitem__(0, 70)),
        "d2t gives ids that are not ascending within",
    ),
    "layers": (
        eagle3_config(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), eagle(),
        "eagle_aux_hidden_state_layer_ids: [0, 1, 9] of 2 layers",
    ),
    "more layers": (
        llama_layer(num_hidden_layers=2), eagle(),
        "num_hidden_layers: 2 layers are not supported",
    ),
    "NaN": (
        eagle3_config(), eagle(lambda t: t["fc.weight"].__setitem__((0, 0), torch.nan)),
        "tensor fc.weight contains values that are not finite",
    ),
    "a tensor short": (
        eagle3_config(), eagle(lambda t: t.pop("layers.0.hidden_norm.weight")),
        "tensor layers.0.hidden_norm.weight is missing",
    ),
    "another algorithm": (
        eagle3_config(speculators_model_type="dflash"), eagle(), "dflash heads are not supported"
    ),
    "medusa: hidden size": (
        medusa_config(),
        heads(lambda t: t.update({"0.0.linear.weight": torch.zeros(48, 48)})),
        "tensor blocks.0.layers.0.weight has shape [48, 48], this model",
    ),
    "medusa: hidden size of the configuration": (
        VLLM | {"hidden_size": 48}, by_vllm(heads()), "hidden_size: 48 is not"
    ),
    "medusa: vocabulary": (
        medusa_config(), heads(lambda t: t.update({"2.1.weight": torch.zeros(99, HIDDEN)})),
        "tensor lm_heads.2.weight has shape [99, 32]",
    ),
    "medusa: vocabulary of the configuration": (
        VLLM | {"vocab_size": 99}, by_vllm(heads()), "vocab_size: 99 is not"
    ),
    "medusa: layers": (
        medusa_config(medusa_num_layers=2), heads(), "medusa_num_layers: 2, the tensors have 1"
    ),
    "medusa: heads that are not there": (
        medusa_config(medusa_num_heads=5), heads(), "medusa_num_heads: 5, the tensors have 4"
    ),
    "medusa: a tensor short": (
        medusa_config(), heads(lambda t: t.pop("1.0.linear.weight")),
        "tensor blocks.1.layers.0.weight is missing",
    ),
    "medusa: no block": (
        medusa_config(), {"0.1.weight": torch.zeros(VOCAB, HIDDEN)},
        "tensor blocks.0.layers.0.weight is missing",
    ),
    "medusa: NaN": (
        medusa_config(), heads(lambda t: t["3.0.linear.bias"].__setitem__(0, torch.nan)),
        "tensor blocks.3.layers.0.bias contains values that are not finite",
    ),
    "medusa: ids": (
        VLLM | TOKEN_MAP,
        {**by_vllm(heads()), "token_map": torch.full((DRAFTS,), 3)},
        "tensor token_map gives ids twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case, tmp_path):
    config, tensors, message = REFUSED[case]
    write_head(tmp_path, config, tensors)
    assert is_head(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, tiny_model())
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)
