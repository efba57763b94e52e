"""The Python API over real, tiny models with random weights."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cbatch import LLM, EngineOptions, FieldError, FinishReason, LookaheadConfig, SamplingParams
from cbatch.runtime.model.config import ModelError
from tests.text.toy_tokenizers import printable

PROMPTS = ["def add(a, b):", "class Node", "for x in y", "abc"]


# Fields of families with recurrent layers, each before a layer of attention.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5, "conv_L_cache": 3},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
}


def write_model(
    folder: Path,
    *,
    layers: int = 2,
    hidden: int = 32,
    tokenizer: Tokenizer | None = None,
    hybrid: str | None = None,
) -> Path:
    """Write a directory with a tokenizer and a configuration, of a family in `HYBRIDS` or like
    Llama. The weights are drawn when it is loaded."""
    folder.mkdir()
    tokenizer = tokenizer or printable()
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    if hybrid is not None:
        config |= HYBRIDS[hybrid] | {"model_type": hybrid, "num_hidden_layers": 4, "head_dim": 16}
        del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "target"), write_model(folder / "draft", layers=1)


def make(pair: tuple[Path, Path], *, draft: bool = True, **options: Any) -> LLM:
    settings = {"max_num_seqs": 4, "random_weights_seed": 0, "numerics": "invariant"} | options
    return LLM(pair[0], pair[1] if draft else None, **settings)


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> LLM:
    return make(pair)


def test_many_prompts_with_different_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=4 + i, temperature=0, ignore_eos=True) for i in range(4)]
    completions = llm.generate(PROMPTS, params)
    assert [len(c.token_ids) for c in completions] == [4, 5, 6, 7]
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert llm.engine.tokenizer is not None
        assert list(completion.prompt_token_ids) == llm.engine.tokenizer.encode(prompt)
        assert completion.finish_reason is FinishReason.LENGTH and completion.error is None
        assert completion.text


def test_a_lone_surrogate_names_its_field(llm: LLM) -> None:
    bad, good = llm.generate(["a\ud800", "a"], SamplingParams(max_tokens=1))
    assert "prompt: character 1 is half of a surrogate pair" in (bad.error or "")
    assert good.error is None
    with pytest.raises(FieldError, match=r"cache_salt: character [0-9]+ is half of a surrogate"):
        llm.engine.add("a", cache_salt="\ud800")
    prompts: list[tuple[str, dict[str, Any]]] = [
        (r"stop\[1\]", {"stop": ("a", "\udfff")}),
        (r"structured_outputs\.regex", {"structured_outputs": {"regex": "\ud800"}}),
        (r"outputs\.json", {"structured_outputs": {"json": {"enum": ["\ud800"]}}}),
    ]
    for place, given in prompts:
        with pytest.raises(FieldError, match=f"{place}: character [0-9]+ is half of a surrogate"):
            SamplingParams(**given)


def test_n_choices_and_the_drawn_seed(llm: LLM) -> None:
    (first,) = llm.generate("abc", SamplingParams(n=3, max_tokens=12, ignore_eos=True))
    assert len({c.token_ids for c in first.choices}) == 3
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert first.seed is not None
    assert first.speculation.steps == sum(c.speculation.steps for c in first.choices)
    without = SamplingParams(n=3, max_tokens=12, ignore_eos=True, seed=first.seed, max_lookahead=0)
    (plain,) = llm.generate("abc", without)
    (again,) = llm.generate("abc", without)
    assert [c.token_ids for c in plain.choices] == [c.token_ids for c in again.choices]


@pytest.mark.parametrize("extreme", [1e-320, 7e307])
def test_temperatures_beyond_float32_work(llm: LLM, extreme: float) -> None:
    """They act like the nearest values in float32. The smallest is as good as greedy. With the
    largest the model has no influence, so that two seeds differ."""
    params = [
        SamplingParams(temperature=t, seed=seed, max_tokens=12, ignore_eos=True)
        for t, seed in ((0.0, 1), (extreme, 1), (extreme, 2))
    ]
    greedy, one, other = llm.generate(["def f"] * 3, params)
    assert one.error is None and other.error is None
    tokens = [completion.token_ids for completion in (greedy, one, other)]
    assert (tokens[0] == tokens[1] == tokens[2]) is (extreme < 1)
    assert (tokens[1] != tokens[2]) is (extreme > 1)


def test_one_bad_request_never_loses_the_others(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    completions = llm.generate(["abc", "", [10**6], "a" * 4000, "abc"], params)
    assert [c.error is None for c in completions] == [True, False, False, False, True]
    assert completions[0].token_ids == completions[4].token_ids
    (ids,) = llm.generate(list(completions[0].prompt_token_ids), params)
    assert ids.token_ids == completions[0].token_ids and llm.generate([]) == []
    for bad in completions[1:4]:
        assert bad.error is not None and bad.error.startswith("prompt: ")
        assert bad.finish_reason is FinishReason.ERROR and bad.choices == ()


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (7, None, "prompts"),
        ("abc", {"max_tokens": 5}, "params"),
        (["abc", "abc"], [SamplingParams(), {}], "params"),
    ],
)
def test_errors_name_arguments_of_a_wrong_type(
    llm: LLM, prompts: Any, params: Any, field: str
) -> None:
    with pytest.raises(FieldError) as caught:
        llm.generate(prompts, params)
    assert caught.value.field == field


def test_a_prompt_of_a_wrong_type_ends_with_an_error(llm: LLM) -> None:
    wrong: list[Any] = [None, b"abc", {"prompt": "abc"}, 1.5, [1.5], [True]]
    *refused, served = llm.generate([*wrong, "abc"])
    assert [each.error is not None and "prompt: " in each.error for each in refused] == [True] * 6
    assert served.error is None and served.choices
    (lone,) = llm.generate(b"abc")  # type: ignore[arg-type]
    assert lone.error is not None and "bytes" in lone.error


def test_the_engines_description_is_logged(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cbatch"):
        llm = make(pair, num_blocks=20, lookahead=LookaheadConfig(policy="fixed", k=2))
    assert "batch_invariant: yes" in caplog.text
    assert llm.info.lookahead == "fixed:2" and llm.info.num_blocks == 20
    assert llm.info.dtype == "float32" and llm.info.numerics == "invariant"


def test_memory_for_kv_sets_the_number_of_blocks(pair: tuple[Path, Path]) -> None:
    with_draft = make(pair, kv_cache_memory_bytes=2**20).info
    alone = make(pair, draft=False, kv_cache_memory_bytes=2**20).info
    assert alone.num_blocks > with_draft.num_blocks > 1
    assert with_draft.kv_cache_memory_bytes <= 2**20
    with pytest.raises(FieldError, match="kv_cache_memory_bytes: does not hold one block"):
        make(pair, kv_cache_memory_bytes=10)


def test_bad_options_are_named(pair: tuple[Path, Path]) -> None:
    for options, field in (
        ({"lookahead": "often"}, "lookahead"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_model_len": 129}, "max_model_len"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
    ):
        with pytest.raises(FieldError) as caught:
            make(pair, **options)
        assert caught.value.field == field
    with pytest.raises(TypeError, match="colour"):
        EngineOptions(colour=1)  # type: ignore[call-arg]
    with pytest.raises(FieldError, match="params: 1 for 2 prompts"):
        make(pair).generate(["a", "b"], [SamplingParams()])


@pytest.fixture
def with_generation_config(pair: tuple[Path, Path], tmp_path: Path) -> Callable[..., LLM]:
    """Return a function that loads the target with a given generation config."""

    def load(values: dict[str, Any], **options: Any) -> LLM:
        for file in pair[0].iterdir():
            shutil.copy(file, tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return make((tmp_path, pair[1]), draft=False, **options)

    return load


def test_every_eos_id_of_the_generation_config_ends_a_text(
    llm: LLM, with_generation_config: Callable[..., LLM]
) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    (whole,) = llm.generate(PROMPTS[0], params)
    end = whole.token_ids[7]
    for setting in ("auto", "none"):
        loaded = with_generation_config({"eos_token_id": [0, end]}, generation_config=setting)
        (cut,) = loaded.generate(PROMPTS[0], params)
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
        assert cut.finish_reason is FinishReason.STOP


def test_the_models_defaults_apply_without_parameters(
    with_generation_config: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    own = {"temperature": 0.0, "max_new_tokens": 3, "do_sample": True}
    logged = "defaults of calls, by generation_config.json: temperature 0.0, max_tokens 3"
    with caplog.at_level(logging.INFO, logger="cbatch"):
        llm = with_generation_config(own)
    assert logged in caplog.messages and logged in llm.info.lines()
    (greedy,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0))
    assert len(greedy.token_ids) == 16
    five = SamplingParams(max_tokens=5, ignore_eos=True)  # its seed is drawn
    mixed = llm.generate([PROMPTS[0]] * 2, [None, five])
    for completion in (*llm.generate(PROMPTS[0]), mixed[0]):
        assert completion.token_ids == greedy.token_ids[:3]
    assert len(mixed[1].token_ids) == 5
    plain = with_generation_config(own, generation_config="none")
    assert plain.engine.default_params == SamplingParams()
    assert not any("generation_config" in line for line in plain.info.lines())


def test_an_unsupported_generation_config_is_rejected(
    with_generation_config: Callable[..., LLM],
) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p: 1\.5 is not allowed"):
        with_generation_config({"top_p": 1.5})
    assert with_generation_config({"top_p": 1.5}, generation_config="none").info.draft is None
    with pytest.raises(FieldError, match="generation_config: 'vllm' is not allowed; use 'auto'"):
        with_generation_config({}, generation_config="vllm")


def test_an_interrupted_batch_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = llm.engine.step, [0]

    def interrupted() -> Any:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return step()

    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    before = [c.token_ids for c in llm.generate(PROMPTS, params)]
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
    assert [c.token_ids for c in llm.generate(PROMPTS, params)] == before
    assert llm.engine.scheduler.num_running == 0
