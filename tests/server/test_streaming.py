"""Several streams joined into one, and left."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cbatch.outputs import Accepted
from cbatch.server.answer import Answer
from cbatch.server.errors import SlowReaderError
from cbatch.server.stream import OutputStream
from cbatch.server.streaming import gather


def test_one_that_fails_leaves_nobody_waiting_for_the_others() -> None:
    async def scene() -> int:
        accepted = Accepted("r", (1,), 1, 1)
        streams = [OutputStream(accepted, lambda: None) for _ in range(3)]
        streams[1].fail(SlowReaderError("on purpose"))
        with pytest.raises(SlowReaderError):
            await gather(streams, cast(Answer[Any], None))
        await asyncio.sleep(0.01)
        return len(asyncio.all_tasks())

    assert asyncio.run(scene()) == 1
