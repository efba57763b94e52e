"""The format of a reply: its thoughts, its tool calls, and what the request says about them."""

from __future__ import annotations

from typing import NamedTuple

from cbatch.text.forced_tools import ForcedCall
from cbatch.text.written_calls import TextParameters


class ThoughtFormat(NamedTuple):
    """The marks around a thought. It begins the reply, or with `anywhere` may also come later."""

    open_mark: str
    close_mark: str
    starts_inside: bool = False  # replies begin inside a thought unless the prompt closes it
    anywhere: bool = False
    dropped_marks: tuple[str, ...] = ()  # other marks, which are removed from the reply
    prompt_end: str = ""  # end of the prompt; it is also the beginning of the reply's first mark
    answer_mark: str = ""  # mark that begins the answer, after a thought and `prompt_end`

    def reply_starts_inside(self, prompt: str) -> bool:
        """Return whether the reply to a prompt begins inside a thought."""
        text = prompt.rstrip()
        if self.starts_inside:
            return not text.endswith(self.close_mark)
        return text.endswith(self.open_mark)


class ToolCallFormat(NamedTuple):
    """The format of a tool call: a tag, a head and a JSON object. The object is the call (a name,
    and `arguments` or `parameters`), or only its arguments if the head has a group `name`. A call
    may lack arguments, have null, or have the object as a text. If there are no tags, only a reply
    that begins with a call has calls.
    For the grammar of calls, a shape has texts around `{call}`, or it is a head with `{name}`.
    With `call` and `pair` (see `read_written`), calls are not JSON: `head` is a plain text that
    begins them, and they have no grammar."""

    tags: tuple[str, ...]
    thoughts: ThoughtFormat  # assumed format if the server has no reasoning parser
    head: str = r"\s*"  # a regular expression
    partial_head: str = r"\s*"  # a regular expression for an incomplete head
    next_head: str | None = None  # head of a further call that has no tag of its own
    end: str = ""  # a tag that may follow a call
    head_tokens: tuple[str, ...] = ()  # control tokens that occur in heads
    shapes: tuple[str, ...] = ()
    separator: str | None = None  # between calls; None: a reply has one call
    name: str = "name"  # these two are members of a call, as the model writes them
    arguments: str = "arguments"
    call: str = ""
    pair: str = ""


class ReplyFormat(NamedTuple):
    """The format of the replies to one request. With `separate` a thought is returned as `Thought`,
    stripped of white space; otherwise it is part of the text. Calls inside a thought are ignored.
    Calls that the request forces (`forced`) are in cbatch's own format. Without `parallel`, the
    model's calls after the first are dropped. `names` are the functions, None if unknown: a call
    without arguments must name one of them. `texts` are parameters whose values are texts."""

    calls: ToolCallFormat | None = None
    thoughts: ThoughtFormat | None = None
    forced: ForcedCall | None = None
    separate: bool = False
    parallel: bool = True
    names: frozenset[str] | None = None
    texts: TextParameters = frozenset()

    @property
    def is_text(self) -> bool:
        """True if every reply is only text."""
        return self.calls is None and self.forced is None and not self.separate

    @property
    def marks(self) -> list[str]:
        calls, thoughts = self.calls, self.thoughts
        marks = [] if calls is None else [*calls.tags, calls.end, *calls.head_tokens]
        if thoughts is not None:
            marks += [thoughts.open_mark, thoughts.close_mark, *thoughts.dropped_marks]
        return marks
