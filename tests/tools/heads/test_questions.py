"""Questions that a model generates, to learn a head from its answers."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from bench.lookahead import CHATS
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_paths
from cbatch.engine.model_files import tokenizer_of
from tests.smollm2 import needs_smollm2
from tools.heads.questions import ask_itself

TARGET = demo_paths()[0]


def templated(folder: Path, template: str) -> Path:
    shutil.copytree(TARGET, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def test_it_asks_within_the_turns_of_its_template(tmp_path):
    """A turn ends at a line's end here, which the demo model does write."""
    model = templated(tmp_path / "turns", "def {{ messages[0]['content'] }}\n")
    questions, tokenizer = ask_itself(model, 24), tokenizer_of(model)
    end = tokenizer.encode("\n")
    assert 4 < len(questions) == len({*questions}) <= 24
    assert not any(end[-1] in tokenizer.encode(text) for text in questions)
    assert {*ask_itself(model, 8)} < {*questions}, "the same in every call, in any company"


def test_without_turns_it_begins_texts():
    questions = ask_itself(TARGET, 8)
    tokenizer = tokenizer_of(TARGET)
    assert 4 < len(questions) == len({*questions})
    assert all(len(tokenizer.encode(text)) <= 14 for text in questions)


def test_a_template_that_hides_the_question_is_refused(tmp_path):
    with pytest.raises(FieldError, match="hides the question") as refused:
        ask_itself(templated(tmp_path / "mute", "Say something."), 2)
    assert refused.value.field == "prompts"


@needs_smollm2
def test_a_chat_model_asks_as_people_do():
    questions = ask_itself("smollm2", 16)
    assert len(questions) > 8 and not {*questions} & {*itertools.chain(*CHATS.values())}
    assert sum("?" in text or text.split()[0].istitle() for text in questions) > len(questions) / 2
