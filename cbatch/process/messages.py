"""Messages between the engine process and the server process, in msgpack. They contain token ids,
no text. A request has a wire id, which is never reused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.engine.core import EngineMetrics, StepOutput


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---- commands, to the engine ------------------------------------------------------------------


class Add(Message, frozen=True):
    """Start the choices of one prompt. The prompt and the parameters may be long, so they are sent
    once. The id and choice in `request` are ignored. `choices` maps wire ids to the index of
    the choice and the tokens that it has already emitted."""

    request: Request
    choices: dict[str, tuple[int, tuple[int, ...]]]

    def requests(self) -> Iterator[tuple[Request, tuple[int, ...]]]:
        for wire_id, (choice, output) in self.choices.items():
            yield structs.replace(self.request, request_id=wire_id, choice=choice), output

    def encoded_ids(self) -> bytes:
        return msgspec.msgpack.encode(list(self.choices))


class Cancel(Message, frozen=True):
    request_id: str


class Finish(Message, frozen=True):
    """Stop a request at a stop string: its output is its first `keep_tokens` tokens."""

    request_id: str
    keep_tokens: int


class Stop(Message, frozen=True):
    """End the process and drop running requests."""


class Watch(Message, frozen=True):
    """Start or stop sending snapshots for the live page."""

    enabled: bool


Command = Add | Cancel | Finish | Stop | Watch

# ---- events, from the engine ------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The model is loaded. `config` decides which requests are accepted. `drafters` are the names
    that requests may use, `info` is for people. `supports_grammars`: structured outputs work."""

    config: SchedulerConfig
    drafters: tuple[str, ...]
    info: dict[str, Any]
    supports_grammars: bool = False


class StartFailed(Message, frozen=True):
    """The engine did not start. `field` and `remedy` are set if an option is at fault."""

    message: str
    field: str | None = None
    remedy: str | None = None


class Stepped(Message, frozen=True):
    """The output of a step, or requests that ended without a step. An idle engine sends an empty
    message as a heartbeat."""

    output: StepOutput
    stats: EngineMetrics
    kv_events: bytes = b""  # a batch of `cbatch.kv_events.wire`; empty: no events


class SlotSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The request in a slot. `tokens` counts prompt and output, `num_uncomputed_tokens` the tokens
    without KV: 1 after prefill. The acceptance is None without an estimate."""

    slot: int
    request_id: str | None  # wire id; for the page, the beginning of the public id
    prompt_tokens: int
    tokens: int
    num_uncomputed_tokens: int
    estimated_acceptance: float | None


class StepSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step, with an entry per row. `chunk` counts tokens except drafts: 1 for a decoding row."""

    slots: list[int]
    drafted: list[int]
    accepted: list[int]
    chunk: list[int]


class BlockMap(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The block pool in cells of `cell_blocks` blocks: used and cached blocks per cell."""

    cell_blocks: int
    used: list[int]
    cached: list[int]


class Snapshot(Message, frozen=True):
    """Data for the live page: some of the last `num_steps` steps, and the present state."""

    rows: tuple[SlotSnapshot, ...]
    steps: tuple[StepSnapshot, ...]
    num_steps: int
    blocks: BlockMap
    stats: EngineMetrics


Event = Ready | StartFailed | Stepped | Snapshot

# ---- bytes ------------------------------------------------------------------------------------


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to another process")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, content = value
        return np.frombuffer(content, dtype).reshape(shape)
    raise NotImplementedError(f"{kind.__name__} cannot be sent to another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event, dec_hook=_decode_array)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def frames_of(command: Command) -> list[bytes]:
    """Return the frames of a command. An `Add` begins with a frame of its request ids:
    if decoding the next frame kills the engine, the journal has the ids of these requests."""
    encoded_ids = [command.encoded_ids()] if isinstance(command, Add) else []
    return [*encoded_ids, encode(command)]


def decode_command(content: bytes) -> Command:
    return _commands.decode(content)


def decode_event(content: bytes) -> Event:
    return _events.decode(content)
