"""The recipe of the demo pair: its data, its growth, its restarts, and a whole tiny run."""

from __future__ import annotations

import inspect
import json
import textwrap

import pytest
import torch
from tokenizers import Tokenizer

from cbatch import LLM, SamplingParams
from tools.demo_pair import text as corpus
from tools.demo_pair import train as recipe

FUNCTION = '''
def mean(values):
    """Average of the values."""
    total = 0
    for value in values:
        total += value
    count = len(values)
    return total / count
'''


def test_a_reformatted_copy_is_dropped_and_new_code_is_kept():
    copies = corpus.Copies()
    assert copies.strip(FUNCTION) == FUNCTION
    copy = FUNCTION.replace("total = 0", "total = 0  # none yet").replace("+=", " += ")
    fresh = FUNCTION.replace("total", "product").replace("+=", "*=")
    assert copies.strip(copy + fresh).strip() == fresh.strip()


def test_chunks_join_to_the_source():
    source = inspect.getsource(textwrap)
    assert len(chunks := corpus.split_chunks(source)) > 10
    assert "".join(chunks) == source


@pytest.mark.parametrize(
    ("module", "held_out"),
    [("heapq", True), ("json.decoder", True), ("test.test_heapq", True), ("test.test_ast", False),
     ("ast", False), ("jsonish", False)],
)  # fmt: skip
def test_held_out_modules_and_their_tests(module, held_out):
    assert corpus.is_held_out(module) is held_out


def test_prompts_end_with_the_docstring_or_a_renamed_signature():
    document = corpus.Document("heapq", FUNCTION, False, True)
    prompts = corpus.choose_prompts([document])
    assert prompts["functions"] == ['def mean(values):\n    """Average of the values."""']
    assert prompts["edits"] == [FUNCTION.strip() + "\n\n\ndef mean_copy(values):"]


@pytest.mark.parametrize(
    "text", ["", "def f():\n\treturn 1\r\n", "naïve 東京 🦀 \u200b", "__a1b2__ 12345"]
)
def test_the_tokenizer_is_exact_for_any_text(text):
    tokenizer = corpus.train_tokenizer([FUNCTION] * 20)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode("x:\n    total").ids]
    assert "\n    " in tokens, "a line break takes the indentation after it"


def tiny_net(num_layers=None):
    torch.manual_seed(0)
    return recipe.make_net((64, 2, 2, 1, 32), num_layers)


def test_growth_keeps_the_logits_and_the_new_layers_learn():
    shallow, ids = tiny_net(), torch.randint(0, 4096, (2, 20))
    deep = recipe.grow(shallow, 6)
    torch.testing.assert_close(deep(ids).logits, shallow(ids).logits)
    deep(ids).logits.square().mean().backward()
    assert deep.model.layers[1].mlp.down_proj.weight.grad.abs().max() > 0


def streams(context_tokens=256):
    generator = torch.Generator().manual_seed(3)
    library = torch.randint(0, 40, (4000,), generator=generator)
    return corpus.Streams(library, library + 40, context_tokens)


def test_a_batch_depends_on_seed_and_step_alone():
    first, again, other = (streams().draw(8, 1, step, True) for step in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert streams().draw(64, 1, 5, True).max() >= 40 > streams().draw(64, 1, 5).max()


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    """The run is interrupted after the growth: the restart restores depth, momentum and step."""
    monkeypatch.setattr(recipe, "TARGET", (64, 2, 2, 1, 32))
    monkeypatch.setattr(recipe, "FIRST_LAYERS", 1)
    monkeypatch.setattr(recipe, "TARGET_ROWS", 1)
    whole = recipe.train_target(streams(), tmp_path, 1e9, 6, seed=1)
    assert whole.config.num_hidden_layers == 2
    (tmp_path / "target.pt").unlink()

    update = recipe.Training.update

    def dying(training, *args):
        update(training, *args)
        if training.step == 4:
            training.step += 1
            training.save()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recipe.Training, "update", dying)
        recipe.train_target(streams(), tmp_path, 1e9, 6, seed=1)
    assert torch.load(tmp_path / "target.pt")["step"] == 5
    resumed = recipe.train_target(streams(), tmp_path, 1e9, 6, seed=1)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_draft_learns_what_the_target_says(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "LESSON_ROWS", 2)
    target, draft = tiny_net().eval(), tiny_net(1)
    prompts = [[1, 2, 3], [4, 5, 6]] * 4
    lessons = recipe.write_lessons(target, streams(32), prompts, 1e9, 0)
    assert lessons.rows.shape == (8, 33)
    greedy = lessons.rows[:4, 3:]
    assert torch.equal(greedy, lessons.top_ids[:4, 2:, 0]), "the target continues its own rows"
    training = recipe.Training(draft, tmp_path / "draft.pt")
    before, _ = recipe.lesson_loss(draft, lessons, torch.arange(8))
    for training.step in range(30):
        loss, _ = recipe.lesson_loss(draft, lessons, torch.arange(8))
        training.update(loss, 0.0)
    assert loss.item() < 0.9 * before.item()


@pytest.mark.slow
def test_a_tiny_run_makes_a_pair_that_the_engine_loads(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "heapq.py").write_text(FUNCTION)
    (text / "other.py").write_text(inspect.getsource(recipe))
    sizes = {
        "CONTEXT_TOKENS": 32,
        "LESSON_ROWS": 2,
        "LESSON_PROMPT_TOKENS": 16,
        "CONTINUED_TOKENS": 8,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(recipe, name, value)
    out, work = tmp_path / "out", tmp_path / "work"
    recipe.main(
        [f"--work={work}", f"--out={out}", f"--text={text}", "--steps=2", "--draft-minutes=0.1"]
    )
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["heapq"]["nats"] > 0 and 0 <= figures["heapq"]["acceptance"] <= 1
    assert json.loads((out / "prompts.json").read_text())["functions"]
    ids = Tokenizer.from_file(str(out / "target/tokenizer.json")).encode("def f").ids
    llm = LLM(out / "target", out / "draft", lookahead="fixed:2")
    completion = llm.generate([ids], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[
        0
    ]
    assert len(completion.token_ids) == 6


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        recipe.main(["dratf"])
    assert "stages: unknown dratf" in capsys.readouterr().err
