"""Output of engines, to the bit, and the steps that produced it. `python -m tests.engine.written`
prints digests of it from a fresh process: see `main`."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cbatch import SamplingParams
from cbatch.core.request.request import MODEL
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.build import parse_lookahead
from cbatch.demo import demo_paths, demo_prompts, edit_prompts
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.loop import ThreadedExecutor
from cbatch.engine.model_files import chat_template_of, find_model, tokenizer_of
from cbatch.engine.prices.startup import max_drafts
from cbatch.llm import complete_all
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.cpu.loaded import CpuModels
from cbatch.text import TextTokenizer
from tests.runtime.engines import made_up_durations
from tests.runtime.logit_bits import digests

SMOLLM2 = "smollm2"
# Used in turn by the requests of a run: greedy, and seeded with coupled verification, whose tokens
# do not depend on drafts. The wide nucleus needs more tokens than the filter looks at first.
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.0, "logprobs_mode": "processed", "repetition_penalty": 1.05},
    {"temperature": 1.4, "top_p": 0.98, "logprobs_mode": "processed"},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02, "presence_penalty": 0.2},
)
COMMON: dict[str, Any] = {"ignore_eos": True, "logprobs": 4}
LENGTHS = (24, 8, 16, 8)  # of outputs, used in turn
SCARCE_BLOCKS = 96  # of 4 tokens: the longest request fits, but 8 others do not fit together
# Prompts for smollm2: repetitive text, which lookups can guess.
PROMPTS = (
    "Repeat this list three times: apple, pear, plum, grape, cherry, apricot, melon, fig.",
    "Write down the numbers from 1 to 40, with commas between them.",
    "Name five rivers of Europe.",
    "Copy this text: the cat sat on the mat, and the dog sat on the rug. The cat sat on the mat, "
    "and the dog sat on the rug. The cat sat on the mat, and the dog sat on the rug.",
)


class Pair(NamedTuple):
    """A target, its draft if it has one, and prompts of about 30 to 300 tokens."""

    target: Model
    draft: Model | None
    tokenizer: TextTokenizer
    prompts: list[list[int]]


@functools.cache
def demo(target: Path, draft: Path) -> Pair:
    """Return the demo's pair, loaded from these files."""
    tokenizer = tokenizer_of(demo_paths()[0])
    texts = [*edit_prompts(), *demo_prompts()]
    prompts = sorted((tokenizer.encode(text) for text in texts), key=len)
    prompts.insert(3, prompts.pop())
    return Pair(load_model(target), load_model(draft), tokenizer, prompts)


@functools.cache
def smollm2() -> Pair:
    path = find_model(SMOLLM2)
    tokenizer, template = tokenizer_of(path), chat_template_of(path)
    assert template is not None
    chats = [template.render([{"role": "user", "content": text}]) for text in PROMPTS]
    prompts = [tokenizer.encode(chat) for chat in chats]
    prompts.append(prompts[3] + prompts[0] + prompts[1] + prompts[3])
    return Pair(load_model(path), None, tokenizer, prompts)


class Watched:
    """An executor that records properties of its steps."""

    def __init__(self, inner: TorchExecutor, *, priced: bool) -> None:
        self._inner, self._priced = inner, priced
        self.reset, self.check = inner.reset, inner.check
        self.widest = 0  # largest number of rows in a step
        self.mixed = 0  # steps with both decoding rows and a prompt chunk that is not the last

    def run(self, plan: StepPlan) -> StepResult:
        result = self._inner.run(plan)
        deciding = int(plan.wants_logits.sum())
        self.widest = max(self.widest, plan.num_rows)
        self.mixed += 0 < deciding < plan.num_rows
        return made_up_durations(plan, result) if self._priced else result


class Written(NamedTuple):
    """`bits`: text, tokens and log probabilities of each request."""

    bits: list[tuple[Any, ...]]
    engine: Engine
    steps: Watched


def write(
    pair: Pair,
    count: int,
    *,
    lookahead: str = "off",
    drafter: Sequence[str] = (),
    batch: int = 1,
    chunk: int = 8192,
    scarce: bool = False,
    enable_prefix_caching: bool = False,
    depth: int = 0,
) -> Written:
    """Run `count` requests; by default one at a time, without drafts, chunks or a cache.

    `batch` is the maximum of concurrent requests, `chunk` of tokens in a step. `scarce`: few and
    small blocks. With a prefix cache all requests run twice.
    """
    target = pair.target.config
    draft = pair.draft if MODEL in drafter else None
    prompts = [pair.prompts[i % len(pair.prompts)] for i in range(count)]
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(count)]
    config = SchedulerConfig(
        num_blocks=SCARCE_BLOCKS if scarce else 2048,
        block_size=4 if scarce else 16,
        max_num_seqs=batch,
        max_model_len=target.max_position_tokens,
        max_num_batched_tokens=max(chunk, batch),
        decode_reserve_tokens=1,
        vocab_size=target.vocab_size,
        enable_prefix_caching=enable_prefix_caching,
        draft_context_tokens=None if draft is None else draft.config.max_position_tokens,
        drafter=tuple(drafter) or None,
        lookahead=parse_lookahead(lookahead),
    )
    # Prices of an invented machine, since drafts may never pay on this machine.
    priced = config.lookahead.policy == "adaptive"
    steps = Watched(
        CpuModels(pair.target, draft).executor(config, max_drafts(config)), priced=priced
    )
    runner = ThreadedExecutor(steps) if depth else steps
    core = EngineCore(Scheduler(config), runner, depth=depth)
    engine = Engine(core, tokenizer=pair.tokenizer)
    params = [
        SamplingParams(seed=2**40 + i, max_tokens=n, **COMMON, **PARAMS[i % len(PARAMS)])
        for i, n in enumerate(lengths)
    ]
    turns = 2 if enable_prefix_caching else 1
    done = [each for _ in range(turns) for each in complete_all(engine, prompts, params)]
    if isinstance(runner, ThreadedExecutor):
        runner.close()
    # The loop recovers from any exception, even from a bug.
    assert engine.scheduler.stats.executor_resets == 0 and not any(c.error for c in done)
    return Written([(c.text, c.token_ids, c.logprobs) for c in done], engine, steps)


def main() -> None:
    """Print digests of the logits of two models, and of output of one or two pairs.

    The first argument is the first model; the demo's is the second. The pairs are the demo's and
    the one of further arguments: two files, or the name of smollm2. As many threads compute as
    torch chooses.
    """
    tiny, *more = sys.argv[1:]
    for line in digests(Path(tiny), demo_paths()[0]):
        print(line)
    pairs = [demo(*demo_paths())]
    if more:
        pairs.append(smollm2() if more == [SMOLLM2] else demo(*map(Path, more)))
    for pair in pairs:
        drafter = ("ngram",) if pair.draft is None else (MODEL,)
        written = write(pair, 6, batch=4, chunk=64, lookahead="fixed:2", drafter=drafter)
        assert written.engine.stats.speculation.accepted_tokens > 0
        print(hashlib.sha256(repr(written.bits).encode()).hexdigest())
    print(f"{torch.get_num_threads()} threads", file=sys.stderr)


if __name__ == "__main__":
    main()
