"""What passes between the engine process and the process that owns its clients: msgpack, one
message each. Token ids only; names of requests are the sender's own and are used once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import Ending, OutputRow
from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.sequence import SchedulerStats
from cbatch.core.speculation.stats import Outlook


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---- commands, to the engine ------------------------------------------------------------------


class NewChoice(msgspec.Struct, frozen=True, array_like=True):
    """What a choice of a call has of its own. `output` are the tokens that it has already: it is
    resumed."""

    request_id: str
    choice: int = 0
    output: tuple[int, ...] = ()


class Add(Message, frozen=True):
    """Choices of one call: prompt and parameters, which may be long, are sent once for all. The id
    and the choice of `request` are nobody's."""

    request: Request
    choices: tuple[NewChoice, ...]

    def requests(self) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Of each choice, with its output."""
        for new in self.choices:
            named = msgspec.structs.replace(
                self.request, request_id=new.request_id, choice=new.choice
            )
            yield named, new.output

    def names(self) -> bytes:
        """Of its requests, as `msgspec.msgpack` writes a list."""
        return msgspec.msgpack.encode([new.request_id for new in self.choices])


class Cancel(Message, frozen=True):
    request_id: str


class Finish(Message, frozen=True):
    """A stop string was found in the text: the output is its first `keep_tokens` tokens."""

    request_id: str
    keep_tokens: int


class Stop(Message, frozen=True):
    """End the process. What still runs is dropped: its owner has dealt with it."""


class Watch(Message, frozen=True):
    """Somebody looks at the live page, or nobody does any more."""

    wanted: bool


Command = Add | Cancel | Finish | Stop | Watch

# ---- events, from the engine ------------------------------------------------------------------


class EngineMetrics(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler at this moment, and its totals since the process began."""

    num_running: int
    num_waiting: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int  # unreferenced, kept for prefix hits
    remaining_prompt_tokens: int  # of requests with a slot, not computed yet
    prompt_token_s: float  # estimated seconds per prompt token at this load; 0: not known
    step_s: float  # in all steps, planning and committing included
    plan_s: float  # of that; beside a running step where steps overlap
    commit_s: float
    totals: SchedulerStats
    outlook: Outlook | None  # None: the policy is not `goodput`
    compiling: tuple[str, ...] = ()  # what some requests wait for


class Ready(Message, frozen=True):
    """The model is loaded. `config` decides which requests are accepted; `drafters` are the names
    that they may ask for; `info` is for people. `follows_grammars`: `structured_outputs` are
    served."""

    config: SchedulerConfig
    drafters: tuple[str, ...]
    info: dict[str, Any]
    follows_grammars: bool = False


class StartFailed(Message, frozen=True):
    """`field` and `remedy` where the input was at fault."""

    message: str
    field: str | None = None
    remedy: str | None = None


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds: drafting and the target model as the executor measured them, and the whole turn with
    planning and committing."""

    draft_s: float
    target_s: float
    total_s: float


class Stepped(Message, frozen=True):
    """A step was committed; it is also the sign of life of an engine that works."""

    admitted: tuple[str, ...]  # entered a slot with this step
    rows: tuple[OutputRow, ...]
    endings: tuple[Ending, ...]
    logprobs: tuple[tuple[str, TokenLogprobs], ...]
    times: StepTimes | None  # None: there was no step
    stats: EngineMetrics
    kv_events: bytes = b""  # a batch, see `cbatch.kv_events.wire`; empty: there were none


class Heartbeat(Message, frozen=True):
    """Of an engine with nothing to do."""

    stats: EngineMetrics


class SeenRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Who holds a slot. `tokens` are known, prompt and output; `todo` of them are still to be
    computed: one, unless the prompt is. `belief` is the estimated acceptance; None: the policy
    estimates nothing."""

    slot: int
    request_id: str
    prompt_tokens: int
    tokens: int
    todo: int
    belief: float | None


class SeenStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """By row. `chunk` are the tokens that are no drafts: 1 where it decodes."""

    slots: list[int]
    drafted: list[int]
    accepted: list[int]
    chunk: list[int]


class BlockMap(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The pool in order of block ids, some blocks a cell: by cell how many are used, and cached."""

    cell_blocks: int
    used: list[int]
    cached: list[int]


class Snapshot(Message, frozen=True):
    """For who watches; some of the steps since the last one, of which there were `num_steps`."""

    rows: tuple[SeenRow, ...]
    steps: tuple[SeenStep, ...]
    num_steps: int
    blocks: BlockMap
    stats: EngineMetrics


Event = Ready | StartFailed | Stepped | Heartbeat | Snapshot

# ---- bytes ------------------------------------------------------------------------------------


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} does not go over the wire")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, content = value
        return np.frombuffer(content, dtype).reshape(shape)
    raise NotImplementedError(f"{kind.__name__} does not go over the wire")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event, dec_hook=_decode_array)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def frames_of(command: Command) -> list[bytes]:
    """A command as it is sent. Of requests the names go first: to read the rest may be the death of
    an engine, and whoever outlives it is to know of what."""
    names = [command.names()] if isinstance(command, Add) else []
    return [*names, encode(command)]


def decode_command(content: bytes) -> Command:
    """Raises `msgspec.MsgspecError`."""
    return _commands.decode(content)


def decode_event(content: bytes) -> Event:
    """Raises `msgspec.MsgspecError`."""
    return _events.decode(content)
