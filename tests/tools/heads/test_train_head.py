"""Training of heads: recorded lessons, learning, and equality with the served head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tools.heads
from cbatch.cli.main import main
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams
from cbatch.demo import demo_head, demo_paths, demo_prompts
from cbatch.engine.model_files import tokenizer_of
from cbatch.runtime.cpu.decoder import load_model
from cbatch.runtime.cpu.drafters.kinds import HEADS
from cbatch.runtime.cpu.drafters.medusa_head import MedusaHead
from cbatch.runtime.drafting.heads.loading import load_heads
from cbatch.runtime.kv_cache import KVCache
from tests.runtime.marks import needs_compiler
from tests.runtime.test_eagle import Cold
from tools.heads.__main__ import make_parser
from tools.heads.eagle_net import EagleNet, EagleShape
from tools.heads.export import load_eagle3, load_medusa, save_medusa
from tools.heads.head_training import HeadTraining
from tools.heads.initial_weights import set_initial_weights
from tools.heads.lessons import Lesson, Shards
from tools.heads.medusa_net import MedusaNet
from tools.heads.record_lessons import record
from tools.heads.target_parts import TargetParts
from tools.heads.train_head import train_head

TARGET = demo_paths()[0]
LAYERS = (2, 6, 9, 12)
SMOLLM2_HEAD = Path(tools.heads.__file__).parent / "smollm2"
SHAPE = EagleShape(256, 3, 8, 4, 32, 64, 1e-5, 1e4)


def train(*words: str) -> int:
    """Run `python -m tools.heads`; return the exit status."""
    return main(words, parser_of=lambda _: make_parser())


@needs_compiler
@torch.inference_mode()
def test_what_is_trained_is_what_is_served():
    """Two successive drafts are compared: training's, for all positions at once, and those of a
    served head."""
    target = load_model(TARGET, dtype="float32")
    head = load_heads(demo_head(), target, TARGET, HEADS)[0]
    tokens = tokenizer_of(TARGET).encode(demo_prompts()[0])[:40]
    target.keep_hidden(LAYERS[:3])
    hidden = target.allocate_hidden(len(tokens))
    kv = KVCache(target.config, 64, 4, target.dtype, target.device)
    target.forward(Cold.batch(tokens), kv, hidden)
    assert hidden is not None
    own = KVCache(head.config, 64, 4, head.dtype, head.device)
    first, carried = head.forward(Cold.batch(tokens), own, head.fuse(hidden).roll(1, 0))
    net = load_eagle3(demo_head(), TargetParts.of(TARGET))
    ids = torch.tensor(tokens)[None]
    drafts = net.draft(ids, hidden[None, :-1], 2)
    assert head.vocabulary is not None
    served = first[1:, head.vocabulary]
    torch.testing.assert_close(drafts[0][0], served, rtol=1e-3, atol=1e-3)
    # The second draft at the last position but one, whose next token is known.
    last, at = len(tokens) - 1, len(tokens) - 3
    second, _ = head.forward(Cold.batch(tokens[last:], last), own, carried[last - 1 : last])
    logits = drafts[1][0, at]
    torch.testing.assert_close(logits, second[0, head.vocabulary], rtol=1e-3, atol=1e-3)


@needs_compiler
def test_states_are_recorded_as_one_pass_has_them_and_once(tmp_path, capsys):
    tokenizer = tokenizer_of(TARGET)
    prompts = [
        (tokenizer.encode(text)[:30], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
        for text in demo_prompts()[:5]
    ]
    shards = record(TARGET, prompts, tmp_path, 60)
    lessons = list(shards.read())
    assert len(lessons) == 5
    assert sorted(each.tokens[: each.num_given].tolist() for each in lessons) == sorted(
        list(tokens) for tokens, _ in prompts
    )
    target = load_model(TARGET)
    target.keep_hidden(LAYERS)
    for lesson in lessons:
        assert len(lesson.tokens) == lesson.num_given + 9
        hidden = target.allocate_hidden(len(lesson.tokens))
        kv = KVCache(target.config, 64, 4, target.dtype, target.device)
        target.forward(Cold.batch(lesson.tokens.tolist()), kv, hidden)
        assert hidden is not None
        # With bf16 KV in blocks of another size sums differ in their last bits.
        torch.testing.assert_close(lesson.states.float(), hidden[:-1], rtol=0.05, atol=0.5)
    files = [file.stat().st_mtime_ns for file in shards.files]
    again = record(TARGET, prompts, tmp_path, 60)
    assert [file.stat().st_mtime_ns for file in again.files] == files


def made_up_lessons(count: int) -> list[Lesson]:
    """Return texts that count up: the next token is the successor of the latest."""
    lessons = []
    for i in range(count):
        tokens = (torch.arange(24) * 3 + 5 * i) % 90
        parts = torch.nn.functional.one_hot(tokens[:-1], 256).bfloat16()
        lessons.append(Lesson(tokens.int(), 1, parts[:, None].repeat(1, 4, 1)))
    return lessons


def made_up_parts() -> TargetParts:
    """Return the parts of a target whose choice is each token's successor."""
    rows, tokens = torch.zeros(4096, 256), torch.arange(90)
    rows[(tokens + 3) % 90, tokens] = 40.0
    parts = TargetParts.of(TARGET)
    return parts._replace(head=rows.bfloat16(), norm=torch.ones(256).bfloat16())


def test_where_it_begins_it_guesses_what_is_linear(tmp_path):
    """This holds before any step; the next draft but one is left to training."""
    parts, held_out = made_up_parts(), made_up_lessons(60)[48:]
    torch.manual_seed(1)
    net = EagleNet(SHAPE, parts, torch.arange(90))
    training = HeadTraining(net, parts, tmp_path / "a.pt", steps=1)
    assert training.acceptance(held_out).by_depth[0] < 0.2
    set_initial_weights(net, made_up_lessons(48))
    assert training.acceptance(held_out).by_depth[0] > 0.9


def test_it_learns_and_goes_on_where_it_was(tmp_path, monkeypatch):
    parts = made_up_parts()

    def training(file: Path) -> HeadTraining:
        torch.manual_seed(1)
        return HeadTraining(EagleNet(SHAPE, parts, torch.arange(90)), parts, file, steps=2)

    lessons, held_out = made_up_lessons(48), made_up_lessons(60)[48:]
    first = training(tmp_path / "a.pt")
    before = first.acceptance(held_out)
    first.run(lessons, seconds=1e9, max_steps=60)
    after = first.acceptance(held_out)
    assert before.by_depth[0] < 0.2 < 0.5 < after.by_depth[0]
    again = training(tmp_path / "a.pt")
    assert (again.step, again.tokens) == (first.step, first.tokens)
    assert again.acceptance(held_out) == after
    again.run(lessons, seconds=1e9, max_steps=62)
    assert again.step == 62


@needs_compiler
def test_the_command_trains_a_head_that_loads(tmp_path, capsys):
    texts = tmp_path / "texts.py"
    texts.write_text("\n".join(demo_prompts() * 3), encoding="utf-8")
    args = ["--text", str(texts), "--out", str(tmp_path / "head"), "--steps", "2", "--depth", "2"]
    assert train(str(TARGET), *args, "--draft-vocab", "512", "--share-head") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(summary["by_depth"]) == 2
    target = load_model(TARGET)
    head = load_heads(tmp_path / "head", target, TARGET, HEADS)[0]
    assert head.head.hidden_layers == LAYERS[:3] and head.head.fc_norm
    assert head.vocabulary is not None and len(head.vocabulary) == 512
    assert "EAGLE-3 head" in (tmp_path / "head" / "README.md").read_text()


def test_a_head_begins_at_another_and_drafts_what_is_said_now(tmp_path):
    """It starts with the other's weights and other ids, and needs no step for what it has learnt
    already."""
    parts, held_out = TargetParts.of(TARGET), made_up_lessons(60)[48:]
    trained = load_eagle3(demo_head(), parts)
    ids = torch.arange(90)
    net = load_eagle3(demo_head(), parts, ids)
    assert torch.equal(net.draft_ids, ids) and torch.equal(net.head_rows, parts.head[:90])
    assert all(
        torch.equal(p, q) for p, q in zip(net.parameters(), trained.parameters(), strict=True)
    )
    training = HeadTraining(net, parts, tmp_path / "a.pt", steps=3, first_depth=2)
    assert [training.depth_at(share) for share in (0, 0.5, 0.7)] == [2, 2, 3]
    assert training.acceptance(held_out).trials


@needs_compiler
def test_what_is_no_head_to_begin_at_is_refused(tmp_path, capsys):
    shards = Shards(tmp_path / "lessons")
    for lesson in made_up_lessons(24):
        shards.record(lesson.tokens, 1, lesson.states)
    shards.flush()
    options = {"kind": "eagle3", "name": "m", "seconds": 1.0, "draft_vocab": 90, "depth": 2}
    rest = {"intermediate_size": None, "with_head": True, "steps": 1}
    for name in ("empty", "out"):
        (tmp_path / name).mkdir()
    smollm2 = SMOLLM2_HEAD
    for other in (tmp_path / "empty", smollm2):
        with pytest.raises(FieldError, match="not an EAGLE-3 head for this model") as refused:
            train_head(TARGET, shards, tmp_path / "out", init=other, **options, **rest)
        assert refused.value.field == "init"
    train_head(TARGET, shards, tmp_path / "out", init=demo_head(), **options, **rest)
    assert "beginning at the head head" in (tmp_path / "out" / "README.md").read_text()
    args = [str(TARGET), "--out", str(tmp_path / "m")]
    for field, refused_options in (
        ("init", ["--kind", "medusa", "--init", str(smollm2)]),
        ("intermediate_size", ["--init", str(smollm2), "--intermediate-size", "64"]),
        ("questions", ["--questions", "9", "--prompts", str(tmp_path / "none")]),
    ):
        assert train(*args, *refused_options) != 0
        assert field in capsys.readouterr().err


@needs_compiler
def test_trained_medusa_heads_are_what_is_served(tmp_path, capsys):
    """Compare logits of training, for all positions at once, with those of served heads. Names and
    shapes are those of vLLM's `Medusa` for such a configuration."""
    texts, out = tmp_path / "texts.py", tmp_path / "head"
    texts.write_text("\n".join(demo_prompts() * 3), encoding="utf-8")
    args = ["--text", str(texts), "--out", str(out), "--kind", "medusa", "--steps", "12"]
    assert train(str(TARGET), *args, "--depth", "2", "--draft-vocab", "512") == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["by_depth"]) == 2
    target = load_model(TARGET, dtype="float32")
    head = load_heads(out, target, TARGET, HEADS)[0]
    assert isinstance(head, MedusaHead) and head.head.hidden_layers == LAYERS[3:]
    tensors = load_file(out / "model.safetensors")
    ids, rows = tensors.pop("token_map"), tensors.pop("lm_head.weight")
    assert len(ids) == len(rows) == 512 and torch.equal(ids, head.vocabulary)
    sizes = {"weight": (256, 256), "bias": (256,)}
    names = [f"blocks.{i}.layers.0" for i in range(2)]
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {
        f"{name}.{kind}": size for name in names for kind, size in sizes.items()
    }
    whole = MedusaNet(TargetParts.of(TARGET), torch.arange(4096), heads=2)
    save_medusa(whole, tmp_path / "whole", with_head=True)
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert stored.keys() == {*tensors, "lm_head.weight"}
    assert load_heads(tmp_path / "whole", target, TARGET, HEADS)[0].vocabulary is None
    tokens = tokenizer_of(TARGET).encode(demo_prompts()[0])[:40]
    target.keep_hidden(LAYERS[3:])
    hidden = target.allocate_hidden(len(tokens))
    kv = KVCache(target.config, 64, 4, target.dtype, target.device)
    target.forward(Cold.batch(tokens), kv, hidden)
    assert hidden is not None
    net = load_medusa(out, TargetParts.of(TARGET))
    every = [torch.arange(39)] * 2
    served = head.logits(head.fuse(hidden[:-1]), every)
    drafts = net.draft(torch.tensor(tokens)[None], hidden[None, :-1], 2)
    assert not torch.equal(drafts[0], drafts[1])
    for own, trained in zip(served, drafts, strict=True):
        torch.testing.assert_close(own[:, ids], trained[0].detach(), rtol=1e-3, atol=1e-3)


def test_medusa_learns(tmp_path):
    """It learns as above, and lessons that lack layers are refused."""
    parts = made_up_parts()
    net = MedusaNet(parts, torch.arange(90), heads=2)
    training = HeadTraining(net, parts, tmp_path / "a.pt", steps=2)
    lessons, held_out = made_up_lessons(48), made_up_lessons(60)[48:]
    before = training.acceptance(held_out)
    training.run(lessons, seconds=1e9, max_steps=120)
    after = training.acceptance(held_out)
    assert before.by_depth[0] < 0.2 < 0.5 < min(after.by_depth)
    shards = Shards(tmp_path / "lessons")
    for lesson in lessons:
        shards.record(lesson.tokens, lesson.num_given, lesson.states[:, -1:])
    shards.flush()
    options = {"name": "x", "seconds": 1.0, "draft_vocab": 90, "intermediate_size": None}
    with pytest.raises(FieldError, match="recordings without the layers"):
        train_head(TARGET, shards, tmp_path, kind="eagle3", depth=2, with_head=True, **options)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--minutes", "0"], "minutes"),
        (["--text", "nowhere.txt"], "text: nowhere.txt cannot be read"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(args, message, tmp_path, capsys):
    out = ["--out", str(tmp_path / "head")]
    assert train(str(TARGET), *out, *args) == 2
    assert message in capsys.readouterr().err
