from __future__ import annotations

import pytest

from cbatch.core.request.request import FinishReason
from tests.checking.language import (
    EMPTY_PREFIX,
    next_token,
    reference_output,
)
from tests.helpers import make_request

ALONE = {"vocab_size": 50, "eos_ids": (), "max_model_len": 100}


def test_a_token_depends_on_seed_choice_and_prefix():
    base, _ = reference_output(make_request("a", [1, 2, 3], max_tokens=20), **ALONE)
    for other in (
        make_request("a", [1, 2, 3], max_tokens=20, seed=1),
        make_request("a", [1, 2, 3], max_tokens=20, choice=1),
        make_request("a", [1, 2, 4], max_tokens=20),
    ):
        assert reference_output(other, **ALONE)[0] != base
    again, _ = reference_output(make_request("b", [1, 2, 3], max_tokens=20), **ALONE)
    assert again == base


def test_banned_tokens_are_stepped_over():
    arguments = {"seed": 1, "choice": 0, "position": 4, "vocab_size": 5}
    token = next_token(EMPTY_PREFIX, banned=(), **arguments)
    assert next_token(EMPTY_PREFIX, banned=(token,), **arguments) == (token + 1) % 5
    with pytest.raises(ValueError, match="leave at least one"):
        next_token(EMPTY_PREFIX, banned=range(5), **arguments)


def test_reference_stops_at_eos_but_not_before_min_tokens():
    settings = ALONE | {"eos_ids": (7,)}
    request = make_request("a", [1, 2, 3], max_tokens=90)
    output, reason = reference_output(request, **settings)
    assert reason is FinishReason.STOP and output[-1] == 7 and 7 not in output[:-1]
    later = make_request("a", [1, 2, 3], max_tokens=90, min_tokens=len(output) + 5)
    longer, _ = reference_output(later, **settings)
    assert len(longer) > len(output) + 5 and longer[: len(output) - 1] == output[:-1]
    assert 7 not in longer[: len(output) + 5]
    through = make_request("a", [1, 2, 3], max_tokens=90, ignore_eos=True)
    assert len(reference_output(through, **settings)[0]) == 90


def test_reference_stops_at_the_end_of_the_context():
    output, reason = reference_output(make_request("a", 95, max_tokens=90), **ALONE)
    assert (len(output), reason) == (5, FinishReason.LENGTH)
