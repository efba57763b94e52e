"""Files of heads in all published layouts give the same numbers; other files are refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelError
from cbatch.runtime.model.head_config import is_head, read_head
from cbatch.runtime.model.head_weights import HeadWeights
from tests.runtime.made_heads import (
    DRAFTS,
    HIDDEN,
    LAYERS,
    Reference,
    draft_ids,
    eagle1_tensors,
    eagle3_config,
    eagle3_tensors,
    llama_fields,
    write_head,
)
from tests.runtime.marks import needs_compiler
from tests.runtime.pairs import VOCAB, tiny_config, tiny_model
from tests.runtime.test_eagle import CLOSE, Cold, embedding, load

IDS = {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}


def sglang_fields(ids: list[int]) -> dict[str, Any]:
    """Return the fields that SpecForge and SGLang write: their ids are those of the layer
    before."""
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    names = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}
    return {**llama_fields(), "draft_vocab_size": DRAFTS, **names}


def midlayer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}


def with_norms(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    if kind == "input_norm":
        return {**tensors, "input_norm.weight": torch.rand(3 * HIDDEN) + 0.5}
    return {**tensors, **{f"fc_norm.{i}.weight": torch.rand(HIDDEN) + 0.5 for i in range(3)}}


LAYOUTS: dict[str, tuple[dict[str, Any], Any, dict[str, bool]]] = {
    "speculators": (eagle3_config(), lambda t: t, {}),
    "SafeAILab": (
        {**llama_fields(), "draft_vocab_size": DRAFTS, **IDS},
        lambda t: midlayer(t),
        {},
    ),
    "SpecForge": (sglang_fields([-1, 0, 1]), midlayer, {}),
    "AngelSlim": (
        {**llama_fields(), "architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 80}
        | {"draft_vocab_size": DRAFTS, **IDS},
        midlayer,
        {},
    ),
    "normed residual": (eagle3_config(norm_before_residual=True), lambda t: t,
                        {"norm_before_residual": True}),
    "normed output": (eagle3_config(norm_output=True), lambda t: t, {"norm_output": True}),
    "a norm before fc": (eagle3_config(), lambda t: with_norms(t, "input_norm"), {}),
    "norms before fc": (eagle3_config(fc_norm=True), lambda t: with_norms(t, "fc_norm"), {}),
}  # fmt: skip


def logits_at_once(folder: Path, tokens: list[int], reference: Reference) -> tuple[Tensor, Tensor]:
    """Return the logits of the second draft after `tokens`: by the head, and by the equations."""
    target = tiny_model()
    head = load(folder, target)
    cold = Cold(reference, head.head.hidden_layers)
    kv = KVCache(head.config, 64, 4, head.dtype, head.device)
    states = head.fuse(cold.states(tokens)).roll(1, 0)
    first, carried = head.forward(cold.batch(tokens), kv, states)
    draft = int(first[-1].argmax())
    second, _ = head.forward(cold.batch([draft], len(tokens)), kv, carried[-1:])
    own = second[-1] if head.vocabulary is None else second[-1][head.vocabulary]
    return own, cold.logits(tokens, [draft])


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_computes_what_the_equations_say_in_every_layout(layout, tmp_path):
    config, rename, flags = LAYOUTS[layout]
    tensors = rename(eagle3_tensors())
    write_head(tmp_path, config, tensors)
    assert is_head(tmp_path)
    plain = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    tokens = torch.randint(0, VOCAB, (13,)).tolist()
    own, expected = logits_at_once(tmp_path, tokens, Reference(plain, embedding(), **flags))
    torch.testing.assert_close(own, expected, **CLOSE)


@needs_compiler
def test_a_head_without_rows_of_its_own_has_the_targets(tmp_path):
    tensors = eagle3_tensors()
    del tensors["lm_head.weight"]
    write_head(tmp_path, eagle3_config(), tensors)
    target = tiny_model()
    rows = load(tmp_path, target)
    kept = {**tensors, "lm_head.weight": _target_rows()[draft_ids()]}
    own, expected = logits_at_once(tmp_path, [1, 2, 3, 4], Reference(kept, embedding()))
    torch.testing.assert_close(own, expected, **CLOSE)
    assert rows.vocabulary is not None


def _target_rows() -> Tensor:
    from tests.runtime.test_eagle import target_head

    return target_head()


@needs_compiler
def test_a_pickle_of_tensors_is_read(tmp_path):
    write_head(tmp_path, eagle3_config(), eagle3_tensors())
    (tmp_path / "model.safetensors").unlink()
    torch.save(midlayer(eagle3_tensors()), tmp_path / "pytorch_model.bin")
    own, expected = logits_at_once(tmp_path, [3, 1, 4], Reference(eagle3_tensors(), embedding()))
    torch.testing.assert_close(own, expected, **CLOSE)


def test_readings_are_what_frameworks_disagree_about(tmp_path):
    config = tiny_config()
    write_head(tmp_path, sglang_fields([0, 1]), eagle3_tensors())
    readings = read_head(tmp_path, config)
    assert [each.hidden_layers for each in readings] == [(1, 2), (0, 1), (1, 2), (0, 1)]
    assert [each.norm_before_residual for each in readings] == [False, False, True, True]
    write_head(tmp_path, eagle3_config(eagle_aux_hidden_state_layer_ids=[0, 2]), eagle3_tensors())
    assert [each.hidden_layers for each in read_head(tmp_path, config)] == [(0, 2)]
    write_head(tmp_path, llama_fields(), eagle1_tensors())
    (first,) = read_head(tmp_path, config)
    assert (first.kind, first.hidden_layers, first.fc_bias) == ("eagle", (2,), True)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("never.txt"),)


def _broken(change: Any) -> dict[str, Tensor]:
    tensors = eagle3_tensors()
    change(tensors)
    return tensors


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "hidden size": (
        eagle3_config(transformer_layer_config={**llama_fields(), "hidden_size": 64}),
        eagle3_tensors(),
        "tensor fc.weight has shape",
    ),
    "vocabulary": (
        eagle3_config(transformer_layer_config={**llama_fields(), "vocab_size": 99}),
        eagle3_tensors(),
        "vocab_size: 99 is not the target's vocabulary of 64",
    ),
    "draft vocabulary": (
        eagle3_config(draft_vocab_size=DRAFTS + 1),
        eagle3_tensors(),
        "tensor d2t has shape",
    ),
    "ids": (
        eagle3_config(),
        _broken(lambda t: t["d2t"].__setitem__(0, 70)),
        "d2t gives ids that are not ascending within",
    ),
    "layers": (
        eagle3_config(eagle_aux_hidden_state_layer_ids=[0, 1, 9]),
        eagle3_tensors(),
        "eagle_aux_hidden_state_layer_ids: [0, 1, 9] of 2 layers",
    ),
    "more layers": (
        eagle3_config(transformer_layer_config={**llama_fields(), "num_hidden_layers": 2}),
        eagle3_tensors(),
        "num_hidden_layers: 2 layers are not supported",
    ),
    "NaN": (
        eagle3_config(),
        _broken(lambda t: t["fc.weight"].__setitem__((0, 0), torch.nan)),
        "tensor fc.weight contains values that are not finite",
    ),
    "a tensor short": (
        eagle3_config(),
        _broken(lambda t: t.pop("layers.0.hidden_norm.weight")),
        "tensor layers.0.hidden_norm.weight is missing",
    ),
    "another algorithm": (
        eagle3_config(speculators_model_type="dflash"),
        eagle3_tensors(),
        "dflash heads are not supported",
    ),
}


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@needs_compiler
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case, target, tmp_path):
    config, tensors, message = REFUSED[case]
    write_head(tmp_path, config, tensors)
    assert is_head(tmp_path)
    with pytest.raises(ModelError) as caught:
        load(tmp_path, target)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value)


def test_code_in_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_head(tmp_path, eagle3_config(), eagle3_tensors())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Code()}))
    with pytest.raises(ModelError, match="pytorch_model.bin"):
        HeadWeights.of(tmp_path)
    torch.save({"fc.weight": _Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="code in a pickle"):
        HeadWeights.of(tmp_path)
    assert not (tmp_path / "never.txt").exists()
