"""Lists of strings without duplicates (`uniqueItems`). An engine is in `test_structured`."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch

from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.grammars.unique_items import UniqueItems
from cbatch.runtime.sampling.structured import Structured
from cbatch.text import TextTokenizer
from tests.text.toy_tokenizers import printable

TOKENIZER = TextTokenizer(printable(), "toy")  # ids are characters and pairs of letters
VOCAB, EOS = TOKENIZER.vocab_size, 0
GRAMMARS = Grammars(lambda: TOKENIZER, VOCAB, (EOS,))


def tags(**schema: Any) -> dict[str, Any]:
    array = {"type": "array", "uniqueItems": True, **schema}
    made = {"type": "object", "properties": {"tags": array}, "required": ["tags"]}
    return made | {"additionalProperties": False}


CITIES = ["abc-1", "abc-2", "ab", "b"]
LISTS: dict[str, dict[str, Any]] = {
    "strings": tags(items={"type": "string", "pattern": "^[ab]{1,2}$"}, minItems=4, maxItems=6),
    "all of them": tags(items={"enum": CITIES}, minItems=4),
    "some of them": tags(items={"$ref": "#/$defs/city"}) | {"$defs": {"city": {"enum": CITIES}}},
    "or null": {
        "type": "object",
        "properties": {"a": {"anyOf": [tags(items={"enum": ["a", "ab"]}), {"type": "null"}]}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "escapes": tags(items={"enum": ['"', '""', "\\", "a\n"]}, minItems=4),
}


def outputs(schema: Any, seed: int) -> tuple[list[int], Structured]:
    """Return random texts among those allowed, with a preference for ends."""
    structured, output = Structured(GRAMMARS, StructuredOutputs(json=schema), VOCAB), list[int]()
    rng = random.Random(seed)
    while EOS not in output:
        row = torch.zeros(VOCAB)
        structured.shape(row)
        bits = np.packbits(row.numpy() == 0, bitorder="little")
        assert structured.allowed_bits().tobytes() == bits.tobytes()
        ids = (row == 0).nonzero()[:, 0].tolist()
        assert ids, f"a dead end after {TOKENIZER.decode(output)}"
        output.append(rng.choices(ids, [20 if i == EOS else 1 for i in ids])[0])
        structured.advance(output[-1])
        assert len(output) < 400
    return output, structured


@pytest.mark.parametrize("name", LISTS)
def test_no_string_is_there_twice_and_no_text_is_stuck(name: str) -> None:
    validator, texts = jsonschema_rs.validator_for(LISTS[name]), set()
    for seed in range(25):
        output, _ = outputs(LISTS[name], seed)
        value = json.loads(TOKENIZER.decode(output))
        validator.validate(value)
        texts.add(str(value))
    assert len(texts) > 1


def test_without_it_strings_would_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UniqueItems, "forbid", lambda *_: None)
    schema = LISTS["strings"] | {"title": "another"}
    texts = [TOKENIZER.decode(outputs(schema, seed)[0]) for seed in range(25)]
    assert not all(jsonschema_rs.is_valid(schema, json.loads(text)) for text in texts)


def test_other_lists_may_repeat() -> None:
    """Lists of other properties, and texts that look like such a list, may repeat."""
    schema = LISTS["strings"]
    schema = schema | {"properties": schema["properties"] | {"notes": {}}}
    structured_outputs = StructuredOutputs(json=schema)
    text = r'{"tags": ["a","b","ab","ba"],"notes": {"x": ["a","a"],"y": "\"tags\": [\"a\",\"a"'
    structured = Structured(GRAMMARS, structured_outputs, VOCAB)
    for token in TOKENIZER.encode(text):
        row = torch.zeros(VOCAB)
        structured.shape(row)
        assert row[token] == 0
        structured.advance(token)
