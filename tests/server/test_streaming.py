"""Several streams merged into one."""

from __future__ import annotations

import asyncio

import pytest

from cbatch.server.protocol.errors import SlowReaderError
from cbatch.server.serving.open_request import merged_outputs
from tests.server.http_client import open_request


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
