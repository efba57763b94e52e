from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import tools.demo_pair.draft as draft_module
import tools.demo_pair.lessons as lessons_module
import tools.demo_pair.target as target_module
from tools.demo_pair.batches import Streams, draw
from tools.demo_pair.draft import Distillation
from tools.demo_pair.evaluate import fresh_hits, tokens_per_step, total_nats
from tools.demo_pair.lessons import build_lessons, read_lesson
from tools.demo_pair.loop import TrainingBudget
from tools.demo_pair.nets import TARGET, Llama
from tools.demo_pair.parallel import Workers
from tools.demo_pair.target import TargetTraining, grow

SMALL = dataclasses.replace(
    TARGET,
    num_layers=2,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=32,
    vocab_size=128,
)


@pytest.fixture
def streams():
    generator = torch.Generator().manual_seed(3)
    library = torch.randint(0, 40, (4000,), generator=generator, dtype=torch.int32)
    return Streams(library, library + 40)


@pytest.fixture
def small_target(monkeypatch):
    monkeypatch.setattr(target_module, "TARGET", SMALL)
    monkeypatch.setattr(target_module, "SHALLOW_LAYERS", 1)
    monkeypatch.setattr(target_module, "TOKENS_PER_STEP", 512)


def small_net(seed=0):
    torch.manual_seed(seed)
    return Llama(SMALL).init_weights().eval()


def test_a_batch_depends_on_seed_and_step_alone(streams):
    first, again = (draw(streams, 5, 1, 8, 33, True) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, draw(streams, 6, 1, 8, 33, True))
    assert draw(streams, 5, 1, 64, 33, True).max() >= 40
    assert draw(streams, 5, 1, 64, 33, False).max() < 40


def test_growing_changes_no_logits_and_the_new_layers_learn():
    ids = torch.randint(0, 100, (2, 20))
    shallow = small_net()
    deep = grow(shallow, dataclasses.replace(SMALL, num_layers=6))
    torch.testing.assert_close(deep(ids), shallow(ids))
    deep(ids).square().mean().backward()
    assert deep.model.layers[1].mlp.down_proj.weight.grad.abs().max() > 0


def test_a_killed_run_goes_on_to_the_same_weights(tmp_path, streams, small_target):
    """The run is interrupted after the growth: the restart restores depth, momentum and step."""
    budget = TrainingBudget(1e9, steps=6)
    whole = TargetTraining(tmp_path / "a", streams, "cpu", 1, Workers(2))
    (tmp_path / "a").mkdir()
    whole.run(budget)
    assert whole.progress.layers == 2

    (tmp_path / "b").mkdir()
    killed = TargetTraining(tmp_path / "b", streams, "cpu", 1, Workers(2))
    step = killed.step

    def dying_step(share):
        if killed.progress.step == 4:
            killed.save()
            raise KeyboardInterrupt
        return step(share)

    killed.step = dying_step
    with pytest.raises(KeyboardInterrupt):
        killed.run(budget)
    resumed = TargetTraining(tmp_path / "b", streams, "cpu", 1, Workers(2))
    assert resumed.progress.step == 4
    resumed.run(budget)
    assert resumed.progress.step == 6
    for a, b in zip(whole.params, resumed.params, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_distillation_learns_what_the_target_says(tmp_path, streams, monkeypatch):
    monkeypatch.setattr(draft_module, "DRAFT", dataclasses.replace(SMALL, num_layers=1))
    monkeypatch.setattr(draft_module, "CONTEXT_TOKENS", 32)
    monkeypatch.setattr(lessons_module, "CONTEXT_TOKENS", 32)
    monkeypatch.setattr(lessons_module, "LESSON_ROWS", 2)
    target, draft = small_net(1), small_net(2)
    prompts = [[1, 2, 3], [4, 5, 6]] * 4
    lessons = build_lessons(target, prompts, streams, 1e9, 0, Workers(2))
    assert lessons.ids.shape == (8, 33)
    # Values recorded while writing equal the target's when it reads the rows again.
    again = read_lesson(target, lessons.ids.long())
    torch.testing.assert_close(lessons.top_logits, again.top_logits, atol=2e-3, rtol=1e-2)
    assert torch.equal(lessons.top_ids[:4, 2:, 0], lessons.ids[:4, 3:].short())

    training = Distillation(tmp_path, lessons, 0, Workers(2), draft)
    everything = torch.arange(8)
    before = training.losses(everything)[0].item()
    for _ in range(30):
        training.step(0.0)
        training.progress.step += 1
    assert training.losses(everything)[0].item() < 0.9 * before


@pytest.mark.parametrize("count", [2, 256, 257, 512, 513, 700, 1300])
def test_every_token_is_scored_once(count):
    net = small_net()
    with torch.no_grad():
        net.model.norm.weight.zero_()
    expected = (count - 1) * math.log(SMALL.vocab_size)
    assert total_nats(net, [7] * count) == pytest.approx(expected, rel=1e-4)


def test_tokens_per_step():
    assert tokens_per_step([[True] * 50], 4) == 5
    assert tokens_per_step([[False] * 50], 4) == 1
    assert tokens_per_step([[True, False] * 30], 4) == 2


def test_a_repeated_run_is_not_fresh():
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 4, 5]
    hits = [False] * 8 + [True, False]
    # Only the second 4 completes a run of four seen before.
    assert fresh_hits([hits], [tokens]) == [False] * 9
    assert len(fresh_hits([[True] * 20], [[7] * 20])) == 4
