"""Several streams merged into one, disconnecting clients, and the bytes of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.request.request import FinishReason
from cbatch.server.protocol.errors import SlowReaderError
from cbatch.server.protocol.requests import parse_chat, parse_completion
from cbatch.server.serving.chat_builder import ChatBuilder
from cbatch.server.serving.metrics import Metrics
from cbatch.server.serving.open_request import merged_outputs
from cbatch.server.serving.request_record import RequestRecord
from cbatch.server.serving.response_builder import CompletionBuilder
from cbatch.text.outputs import Choice, Output, Speculation
from tests.server.http_client import open_request, toy_model


def test_a_failed_stream_does_not_block_the_others() -> None:
    async def scene() -> None:
        streams = [open_request() for _ in range(3)]
        streams[1].fail(SlowReaderError("on purpose"))
        with pytest.raises(SlowReaderError):
            async for _ in merged_outputs(streams):
                pass
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)

    asyncio.run(scene())


NAME = '"":""'  # Text that must not be mistaken for the place of the text in a frame.
CHAT = {"messages": [{"role": "user", "content": "x"}]}
KINDS: dict[str, tuple[Any, Any, dict[str, Any], Any]] = {
    "completion": (CompletionBuilder, parse_completion, {"prompt": "x"}, "none"),
    "chat": (ChatBuilder, parse_chat, CHAT, "none"),
    "thought": (ChatBuilder, parse_chat, CHAT, "deepseek_r1"),
}
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"n": 2},
)


def events(kind: str, fields: dict[str, Any], texts: Sequence[str], *, whole: bool) -> bytes:
    """Return events for the texts, of every choice in turn, and for their end. `whole`: each event
    is encoded from its beginning to its end."""
    made, parse, body, parser = KINDS[kind]
    model = toy_model(name=NAME, reasoning_parser=parser)
    record = RequestRecord(METRICS, "POST", "/", "x")
    answer = made(parse(json.dumps(body | fields).encode(), model), model, record)
    if whole:
        answer._only_text = False
    num_choices = answer.api_request.params.n
    answer.open(open_request((1, 2), n=num_choices, seed=3))
    end = Choice(0, "", (), FinishReason.STOP, None, Speculation())
    outputs = [Output("r", at, text, (5, 6)) for text in texts for at in range(num_choices)]
    outputs += [Output("r", at, "end", (7,), finished=end) for at in range(num_choices)]
    content, head = b"".join(answer.event(0, each) for each in outputs), answer._head
    assert content.startswith(head)
    return content.replace(head, b"")  # it has an id of its own


METRICS = Metrics("m", cast(Any, None))


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(st.text(max_size=6) | st.just("</think>"), max_size=8))
@settings(max_examples=25, deadline=None)
def test_a_cached_frame_gives_the_same_bytes_as_encoding_the_whole_event(
    kind: str, fields: dict[str, Any], texts: list[str]
) -> None:
    assert events(kind, fields, texts, whole=False) == events(kind, fields, texts, whole=True)
