"""A small server of the OpenAI API, with a made-up model and faults that can be planted."""

from __future__ import annotations

import asyncio
import codecs
import json
import random
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import numpy as np

FAULTS = {
    "batch": "a token depends on the batch",
    "biased drafts": "one token in a hundred is the likeliest, not a sampled one",
    "logprobs of the neighbour": "log probabilities are of another row, beside others",
    "usage": "usage counts one token too many",
    "stop": "the first characters of a stop string are streamed",
    "schema": "the answer of a schema is cut if there is reasoning",
    "stall": "a long prompt stops all streams for 2 s",
    "split": "characters are split between events",
    "seed": "seeds are ignored under load",
    "cancel": "a request goes on after its client has left",
    "top-k": "top_k keeps one token too many",
    "failure": "a request with min_p fails",
}
_EMOJI = "\U0001f600".encode()
VOCABULARY: list[bytes] = [
    *(
        f" {word}".encode()
        for word in ["the", "a", "of", "to", "and", "in", "is", "it", "on", "as"]
    ),
    *(b"def", b"(", b")", b":", b"\n", b"    ", b"return", b" x", b" y", b" +", b" =", b"."),
    *(bytes([97 + i, 97 + 7 * i % 26]) for i in range(26)),
    *(_EMOJI[:2], _EMOJI[2:]),
]
NAMES = [each.decode("utf-8", "replace") for each in VOCABULARY]
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "logit_bias")
FIRST, SECOND = len(VOCABULARY) - 2, len(VOCABULARY) - 1
_random = np.random.default_rng(0)
_LAST, _BEFORE = 1.5 * _random.normal(size=(2, len(VOCABULARY), len(VOCABULARY)))
SLOTS, STEP_S, LONG_CHARS = 16, 0.0004, 4000


@cache
def logits_of(before: int, last: int) -> np.ndarray:
    if last == FIRST:
        return np.where(np.arange(len(VOCABULARY)) == SECOND, 0.0, -60.0)
    row = _LAST[last] + _BEFORE[before]
    return np.where(np.arange(len(VOCABULARY)) == SECOND, -60.0, row)


@cache
def logprobs_of(before: int, last: int) -> np.ndarray:
    logits = logits_of(before, last)
    return logits - np.log(np.exp(logits).sum())


@cache
def _cumulated(before: int, last: int, fields: str) -> tuple[int, list[float]]:
    """Return the likeliest token, and the running sums of the probabilities."""
    chances = filtered(logits_of(before, last), json.loads(fields), [])
    return int(np.argmax(chances)), np.cumsum(chances).tolist()


def filtered(logits: np.ndarray, body: dict[str, Any], output: list[int]) -> np.ndarray:
    """Return the probabilities after penalties, bias and filters."""
    logits = logits.copy()
    for token, count in Counter(output).items():
        logits[token] -= body.get("presence_penalty", 0) + count * body.get("frequency_penalty", 0)
    for token, bias in (body.get("logit_bias") or {}).items():
        logits[int(token)] += bias
    chances = np.exp((logits - logits.max()) / (body.get("temperature") or 1.0))
    order = np.argsort(-chances, kind="stable")
    chances /= chances.sum()
    cut = body.get("top_k") or len(order)
    if body.get("top_p"):
        cut = min(cut, 1 + int((np.cumsum(chances[order]) < body["top_p"]).sum()))
    chances[order[cut:]] = 0
    chances[chances < body.get("min_p", 0) * chances.max()] = 0
    return chances / chances.sum()


class PlantedServer:
    def __init__(self, faults: set[str]) -> None:
        assert faults <= FAULTS.keys()
        self.faults, self.running, self.stalled_until_s = faults, 0, 0.0
        self._slots = asyncio.Semaphore(SLOTS)
        self._unseeded = np.random.default_rng(1)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                length = 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                raw = await reader.readexactly(length)
                task = asyncio.create_task(self._answer(path, raw, writer))
                departure = asyncio.create_task(self._left(writer))
                await asyncio.wait([task, departure], return_when=asyncio.FIRST_COMPLETED)
                departure.cancel()
                if not task.done() and "cancel" not in self.faults:
                    task.cancel()
                await task
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def _left(writer: asyncio.StreamWriter) -> None:
        while not writer.transport.is_closing():
            await asyncio.sleep(0.01)

    async def _answer(self, path: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return self._send(writer, 200, {"data": [{"id": "planted"}]})
        if path == "/metrics":
            return self._send(writer, 200, f"vllm:num_requests_running{{}} {self.running}\n")
        body = json.loads(raw)
        if path == "/tokenize":
            ids = [VOCABULARY.index(body["prompt"].encode())]
            return self._send(writer, 200, {"tokens": ids})
        if problem := _problem(body):
            return self._send(writer, 400, {"error": {"message": problem}})
        if body.get("top_k") and "top-k" in self.faults:
            body["top_k"] += 1
        if body.get("min_p") and "failure" in self.faults:
            return self._send(writer, 500, {"error": {"message": "the engine died"}})
        text = body.get("prompt") or json.dumps(body["messages"])
        if len(text) > LONG_CHARS and "stall" in self.faults:
            self.stalled_until_s = asyncio.get_running_loop().time() + 2.0
        async with self._slots:
            self.running += 1
            try:
                await self._generate(body, text, writer)
            finally:
                self.running -= 1
        return None

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, document: Any) -> None:
        data = document.encode() if isinstance(document, str) else msgspec.json.encode(document)
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))

    async def _generate(
        self, body: dict[str, Any], text: str, writer: asyncio.StreamWriter
    ) -> None:
        replies, usage = [], 0
        for index in range(body.get("n", 1)):
            if "messages" in body and (body.get("response_format") or body.get("tools")):
                replies.append(self._structured(body, index))
                usage += 8
                continue
            ids, logprobs = await self._sample(body, text, index)
            pieces, reason = self._cut(body, ids)
            usage += len(ids) + ("usage" in self.faults)
            replies.append({"pieces": pieces, "reason": reason, "logprobs": logprobs})
        counts = {"prompt_tokens": len(text) // 4, "completion_tokens": usage}
        if not body.get("stream"):
            choices = [_whole(body, i, each) for i, each in enumerate(replies)]
            return self._send(writer, 200, {"choices": choices, "usage": counts})
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        loop = asyncio.get_running_loop()
        for index, reply in enumerate(replies):
            for event in _events(body, index, reply):
                while loop.time() < self.stalled_until_s:
                    await asyncio.sleep(0.05)
                _chunk(writer, {"choices": [event]})
                await asyncio.sleep(0.008 if "cancel" in self.faults else STEP_S)
        _chunk(writer, {"choices": [], "usage": counts})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return None

    async def _sample(
        self, body: dict[str, Any], text: str, index: int
    ) -> tuple[list[int], list[Any]]:
        seed, rows, faults = body.get("seed"), [], self.faults
        output = [sum(text.encode()) % 40, sum(text[::2].encode()) % 40]
        if seed is None or ("seed" in self.faults and self.running > 4):
            seed = int(self._unseeded.integers(2**31))
        rng, is_greedy = random.Random(f"{seed} {index}"), body.get("temperature", 1.0) == 0
        counted = body.get("presence_penalty") or body.get("frequency_penalty")
        fields = json.dumps({name: body[name] for name in SAMPLING if name in body})
        for position in range(body.get("max_tokens", 16)):
            before, last = output[-2:]
            if "batch" in faults and self.running > 4 and position == 9:
                before, last = last, before
            if counted:
                chances = filtered(logits_of(before, last), body, output[2:])
                best, sums = int(np.argmax(chances)), np.cumsum(chances).tolist()
            else:
                best, sums = _cumulated(before, last, fields)
            token = best if is_greedy else min(bisect_right(sums, rng.random()), SECOND)
            if "biased drafts" in faults and not is_greedy and rng.random() < 0.01:
                token = best
            output.append(token)
            is_shifted = "logprobs of the neighbour" in faults and self.running > 4
            rows.append(_logprob(before, last, token, body.get("logprobs") or 0, is_shifted))
            await asyncio.sleep(STEP_S if self.running < 4 else 0)
        return output[2:], rows

    def _cut(self, body: dict[str, Any], ids: list[int]) -> tuple[list[str], str]:
        """Return the texts of the events, up to a stop string."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if "split" in self.faults and body.get("stream"):
            pieces = [VOCABULARY[token].decode("utf-8", "replace") for token in ids]
        else:
            pieces = [decoder.decode(VOCABULARY[token]) for token in ids]
        stops, text = body.get("stop") or [], "".join(pieces)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        if not ends:
            return pieces, "length"
        end, kept = min(ends) + ("stop" in self.faults and bool(body.get("stream"))), []
        for piece in pieces:
            kept.append(piece[: max(end, 0)])
            end -= len(piece)
        return [piece for piece in kept if piece], "stop"

    def _structured(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        kwargs = body.get("chat_template_kwargs") or {}
        reply: dict[str, Any] = {"reason": "stop", "logprobs": [], "pieces": []}
        if kwargs.get("enable_thinking"):
            reply["reasoning"] = "well, " * 3
        if body.get("tool_choice") == "required":
            function = {"name": "measure", "arguments": '{"name": "a", "size": 3}'}
            return reply | {"calls": [{"index": 0, "function": function}], "reason": "tool_calls"}
        schema = body["response_format"]["json_schema"]["schema"]
        text = json.dumps(_example(schema))
        if "schema" in self.faults and "reasoning" in reply:
            text = text[:-1]
        return reply | {"pieces": [text[i : i + 3] for i in range(0, len(text), 3)]}


def _problem(body: dict[str, Any]) -> str | None:
    kinds: dict[str, Any] = {
        "temperature": (int, float),
        "max_tokens": int,
        "prompt": str,
        "stop": list,
        "n": int,
        "logit_bias": dict,
        "seed": int,
    }
    for name, kind in kinds.items():
        if not isinstance(body.get(name, kind() if isinstance(kind, type) else 0), kind):
            return f"{name}: has another type"
    if body.get("max_tokens", 1) < 1 or body.get("top_p", 1) > 1:
        return "max_tokens or top_p: out of range"
    return "max_lookahead: there is none" if "max_lookahead" in body else None


def _example(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: _example(each) for name, each in schema["properties"].items()}
    examples = {"string": "a", "integer": 3, "boolean": True, "array": [True]}
    return examples[schema["type"]]


@cache
def _logprob(
    before: int, last: int, token: int, tops: int, is_shifted: bool
) -> tuple[str, float, dict[str, float]]:
    row = np.roll(logprobs_of(before, last), is_shifted).tolist()
    best = sorted(range(len(row)), key=lambda token: -row[token])[:tops]
    return NAMES[token], row[token], {NAMES[i]: row[i] for i in (*best, token)}


def _fields(body: dict[str, Any], text: str, reasoning: str = "") -> dict[str, Any]:
    if "messages" not in body:
        return {"text": text}
    key = "delta" if body.get("stream") else "message"
    return {key: {"content": text} | ({"reasoning_content": reasoning} if reasoning else {})}


def _probabilities(body: dict[str, Any], rows: list[Any]) -> dict[str, Any]:
    if not body.get("logprobs") or not rows:
        return {}
    tokens, values, tops = zip(*rows, strict=True)
    return {"logprobs": {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}}


def _whole(body: dict[str, Any], index: int, reply: dict[str, Any]) -> dict[str, Any]:
    choice = _fields(body, "".join(reply["pieces"]), reply.get("reasoning", ""))
    if "calls" in reply:
        choice["message"]["tool_calls"] = reply["calls"]
    choice |= _probabilities(body, reply["logprobs"])
    return choice | {"index": index, "finish_reason": reply["reason"]}


def _events(body: dict[str, Any], index: int, reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if reply.get("reasoning"):
        yield {"index": index, **_fields(body, "", reply["reasoning"])}
    if "calls" in reply:
        yield {"index": index, "delta": {"tool_calls": reply["calls"]}}
    for at, piece in enumerate(reply["pieces"]):
        rows = reply["logprobs"][at : at + 1] if len(reply["logprobs"]) > at else []
        yield {"index": index, **_fields(body, piece), **_probabilities(body, rows)}
    yield {"index": index, **_fields(body, ""), "finish_reason": reply["reason"]}


def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    data = b"data: %s\n\n" % msgspec.json.encode(event)
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def planted(*faults: str) -> Iterator[str]:
    """Run a server with these faults in a thread. Give its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(PlantedServer({*faults}).handle, "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def stop() -> None:
            server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
