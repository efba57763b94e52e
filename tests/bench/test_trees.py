"""Trees of drafts: what stands of them, and what they are worth at a price."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.trees import (
    DEPTH,
    NODES,
    Shape,
    answers,
    best,
    by_data_sheet,
    eagle_shapes,
    eagle_trees,
    main,
    medusa_shapes,
    places,
)
from cbatch.demo import demo_head, demo_paths
from tests.runtime.marks import needs_compiler
from tools.heads.export import load_eagle3
from tools.heads.lessons import Lesson
from tools.heads.medusa_net import MedusaNet
from tools.heads.target_parts import TargetParts


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> list[Lesson]:
    return answers(Path(tmp_path_factory.mktemp("lessons")), 3, 24)


@needs_compiler
@torch.inference_mode()
def test_trees_are_grown_from_what_the_head_says(lessons: list[Lesson]) -> None:
    """A chain is the head's own likeliest drafts; a node's children see the path that they are on:
    what stands of a chain, a tree has with the same chances, where it went on from it."""
    net = load_eagle3(demo_head(), TargetParts.of(demo_paths()[0]))
    lesson = lessons[0]
    told, right = eagle_trees(net, lesson, 1)
    logits = net.draft(lesson.tokens.long()[None], lesson.states[None], DEPTH)
    drafts = [net.draft_ids[each[0].argmax(-1)] for each in logits]
    where, stands = places(lesson), torch.ones(len(drafts[0]), dtype=torch.bool)
    for depth, each in enumerate(drafts):
        truth = lesson.tokens[2 + depth :]
        stands = stands[: len(truth)] & (each[: len(truth)] == truth)
        assert torch.equal(right[depth, 0], stands[where])
    wide, found = eagle_trees(net, lesson, 4)
    assert (found.sum(1) <= 1).all()
    on_path = wide.masked_fill(~found, -torch.inf).amax(1)
    both = right[:, 0] & found.any(1)
    assert both[0].any() and both[2].any()
    torch.testing.assert_close(on_path[both], told[:, 0][both], rtol=1e-3, atol=1e-3)


@needs_compiler
def test_more_nodes_never_stand_less(lessons: list[Lesson]) -> None:
    net = load_eagle3(demo_head(), TargetParts.of(demo_paths()[0]))
    stands = dict(eagle_shapes(net, lessons))
    for shape, rate in stands.items():
        more = [s for s in stands if s[:4] == shape[:4] and s.nodes > shape.nodes]
        assert all(stands[s] >= rate for s in more)
    chain = stands[Shape("EAGLE", 1, DEPTH, DEPTH, DEPTH)]
    assert 0 < chain < max(stands.values()) <= DEPTH


def test_medusas_tree_is_that_of_the_ranks_that_were_right(lessons: list[Lesson]) -> None:
    net = MedusaNet(TargetParts.of(demo_paths()[0]), torch.arange(4096), heads=2)
    found = dict(medusa_shapes(net, lessons))
    trees = [rate for shape, rate in found.items() if shape.width > 1]
    assert len(trees) > 4 and trees == sorted(trees) and trees[-1] > trees[0]


def test_a_tree_is_worth_what_verifying_it_leaves() -> None:
    chain, tree = Shape("EAGLE", 1, 2, 2, 2), Shape("EAGLE", 4, 3, 9, max(NODES))
    price, shapes = by_data_sheet(), [(chain, 0.9), (tree, 1.6)]
    assert best(shapes, price, 1)[0] == tree
    assert best(shapes, price, 32)[0] == chain
    assert best([(chain, 0.0)], price, 1) == (None, 0.0, 1.0)


@needs_compiler
def test_a_row_for_each_machine_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--prompts", "2", "--tokens", "16"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["in_flight"] for row in rows] == [1, 8, 32] * 2
    assert all(row["chain_of_off"] >= 1 and row["tree_of_off"] >= 1 for row in rows)
