from __future__ import annotations

import pytest

from tools.demo_pair.data import (
    NearDuplicates,
    is_held_out,
    load_corpus,
    split_chunks,
    strip_duplicates,
)
from tools.demo_pair.prompts import choose_prompts, function_heads

ORIGINAL = '''import os


def mean(values):
    """Average of the values."""
    total = 0
    for value in values:
        total += value
    count = len(values)
    return total / count


class Box:
    size = 1

    def area(self, scale):
        width = self.size * scale
        height = self.size * scale
        result = width * height
        print(result)
        return result
'''

# The same functions reformatted and commented, in another order, with one new function.
COPY = '''class Box2:
    def area(self,  scale):
        width = self.size*scale  # wide
        height = self.size * scale
        result = width * height
        print( result )
        return result

    def fresh(self, other):
        first = other.first
        second = other.second
        third = first + second
        print(third)
        return third


def mean(values):
    """Average of the values."""
    total = 0
    # add them
    for value in values:
        total += value

    count = len(values)
    return total / count
'''


@pytest.fixture
def library(tmp_path):
    """Write a tiny library: a held-out module, a near copy of it, and a module of its own."""
    (tmp_path / "heapq.py").write_text(ORIGINAL)
    (tmp_path / "aaa.py").write_text(COPY)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_heapq.py").write_text("def check():\n    return 1\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    return tmp_path


def test_chunks_join_to_the_source():
    chunks = split_chunks(ORIGINAL)
    assert "".join(chunks) == ORIGINAL
    assert [chunk.split("(")[0].strip() for chunk in chunks] == [
        "import os", "def mean", "class Box:\n    size = 1", "def area",
    ]  # fmt: skip


def test_near_duplicates_are_stripped_and_new_code_stays():
    seen = NearDuplicates()
    assert strip_duplicates(ORIGINAL, seen) == ORIGINAL
    rest = strip_duplicates(COPY, seen)
    assert "def fresh" in rest
    assert "def mean" not in rest
    assert "def area" not in rest


def test_held_out_modules_are_not_trained_on(library):
    corpus = load_corpus(library)
    assert [document.module for document in corpus.held_out] == ["heapq"]
    assert [document.module for document in corpus.train] == ["aaa"]
    # The copy of the held-out function is removed from training, not from the held-out text.
    assert "def mean" in corpus.held_out[0].text
    assert "def mean" not in corpus.train[0].text
    assert corpus.dropped_bytes > 200


@pytest.mark.parametrize(
    ("module", "held_out"),
    [("heapq", True), ("json.decoder", True), ("test.test_heapq", True), ("test.test_os", False),
     ("heapqueue", False), ("email.json", False), ("os", False)],
)  # fmt: skip
def test_held_out_covers_packages_and_tests(module, held_out):
    assert is_held_out(module) is held_out


def test_heads_end_with_the_docstring(library):
    document = load_corpus(library).held_out[0]
    assert list(function_heads(document)) == ['def mean(values):\n    """Average of the values."""']
    prompts = choose_prompts([document])
    assert len(prompts["functions"]) == 1
    assert prompts["edits"][0].endswith("\n\n\ndef mean_copy(values):")
