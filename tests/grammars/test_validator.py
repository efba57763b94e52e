"""Grammars that kill their compiler, or take unlimited time or memory, and many grammars at
once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.demo import demo_paths
from cbatch.grammars import Grammars, GrammarsBusyError, GrammarValidator
from cbatch.grammars import validator as validator_module
from cbatch.text import load_tokenizer
from cbatch.workers import TaskLimits, WorkerPool

TOKENIZER = load_tokenizer(demo_paths()[0])


class State:
    def __init__(self) -> None:
        self.grammars = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,), kept_s=0)


def compile_forever(*_: Any) -> None:
    while True:
        pass


def chain(count: int, link: str, last: str) -> str:
    return "".join(link.format(i, i + 1) for i in range(count)) + last.format(count)


def references(count: int, link: str) -> str:
    links = ",".join(link.format(f"{i:x}", f"{i + 1:x}") for i in range(count))
    return f'{{"$defs":{{{links},"{count:x}":{{}}}},"$ref":"#/$defs/0"}}'


# Grammars that killed a compiling process with a stack of 8 MiB, or blocked it for seconds.
HOSTILE = {
    "rules": {"grammar": "start: r0\n" + chain(3000, "r{}: r{}\n", 'r{}: "a"')},
    "terminals": {"grammar": "start: T0\n" + chain(3400, "T{}: ~T{}\n", 'T{}: "a"')},
    "negations": {"grammar": "start: T\nT: " + "~" * 60_000 + "/a/"},
    "references": {"json": references(1200, '"{}":{{"$ref":"#/$defs/{}"}}')},
    "alternatives": {"json": references(1200, '"{}":{{"anyOf":[{{"$ref":"#/$defs/{}"}},{{}}]}}')},
    "options": {"regex": "a?" * 32_000},
    "groups": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "intersections": {
        "grammar": "start: T\nT: " + " & ".join(f"/[ab]*{'a' * i}[ab]*/" for i in range(100))
    },
    "depth": {"json": '{"items":' * 7000 + "{}" + "}" * 7000},
}


@asynccontextmanager
async def validating(**options: Any) -> AsyncIterator[GrammarValidator]:
    workers = WorkerPool(State)
    made = GrammarValidator(workers, **options)
    try:
        yield made
    finally:
        await made.close()
        await workers.close()


def run(scene: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scene, 120)

    asyncio.run(bounded())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_accepted_or_rejected(name: str) -> None:
    """A rejection has a reason, and the next grammar is validated."""

    async def scene() -> None:
        async with validating() as validator:
            try:
                await validator.check(StructuredOutputs(**HOSTILE[name]), field="mine")
            except FieldError as error:
                assert error.field == "mine" and error.problem and error.remedy
                assert len(str(error)) < 1000
            await validator.check(StructuredOutputs(regex="[a-z]+"))

    run(scene())


def test_each_failure_has_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with validating() as validator:
            for name, words in (
                ("options", "is nested too deeply, or needs more than 128 MiB"),
                ("groups", "does not compile"),
            ):
                with pytest.raises(FieldError, match=words):
                    await validator.check(StructuredOutputs(**HOSTILE[name]))
            with pytest.raises(FieldError, match="has 70000 characters; use <= 65536"):
                await validator.check(StructuredOutputs(regex="a" * 70_000))
            monkeypatch.setattr(validator_module, "MAX_START_S", 0.0)
            with pytest.raises(FieldError, match="to start, for each choice"):
                await validator.check(StructuredOutputs(regex="[a-z]+x"))

    run(scene())


def test_processor_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system ends the worker, whatever it computes."""

    async def scene() -> None:
        async with validating() as validator:
            with monkeypatch.context() as patched:
                patched.setattr(validator_module, "try_out", compile_forever)
                patched.setattr(validator_module, "LIMITS", TaskLimits(0.2, 2**30))
                with pytest.raises(FieldError, match="takes more than 0.2 s to compile"):
                    await validator.check(StructuredOutputs(regex="a"))
            await validator.check(StructuredOutputs(regex="b"))

    run(scene())


def test_a_grammar_is_checked_once_for_all_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Any] = []
    ask = WorkerPool.run

    async def counted(self: Any, task: Any, limits: TaskLimits) -> Any:
        checks.append(task)
        return await ask(self, task, limits)

    monkeypatch.setattr(WorkerPool, "run", counted)

    async def scene() -> None:
        async with validating(max_waiting=1) as validator:
            good, bad = StructuredOutputs(regex="[a-z]+"), StructuredOutputs(regex="(")
            await asyncio.gather(*(validator.check(good, owner="me") for _ in range(20)))
            for _ in range(3):
                with pytest.raises(FieldError):
                    await validator.check(bad)
            assert len(checks) == 2

    run(scene())


def test_gbnf_is_converted_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting a long grammar takes a second of Python, which would delay the engine's steps."""

    def refuse(text: str) -> str:
        raise AssertionError("not here")

    monkeypatch.setattr("llguidance.gbnf_to_lark.gbnf_to_lark", refuse)
    gbnf, lark = (
        StructuredOutputs(grammar=f"{first} r0\n" + chain(900, f"r{{}} {sign} r{{}}\n", last))
        for first, sign, last in (
            ("root ::=", "::=", 'r{} ::= "a"'),
            ("start:", ":", 'r{}: "a"'),
        )
    )

    async def scene() -> None:
        async with validating() as validator:
            tried = await validator.check(gbnf)
            assert tried.spec != gbnf
            Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,)).check(tried.spec)
            assert (await validator.check(lark)).spec is lark
            assert validator._cached_chars == len(tried.spec.grammar or "")
            monkeypatch.setattr(validator_module, "MAX_CACHED_CHARS", 100)
            for letter in "abcdefgh":
                await validator.check(StructuredOutputs(grammar=f'root ::= "{letter}"'))
            assert 2 <= len(validator._verdicts) <= 6 and 0 < validator._cached_chars <= 100

    run(scene())


def test_a_schema_is_rewritten_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gets the rewritten schema."""

    def refuse(*_: Any) -> None:
        raise AssertionError("not here")

    monkeypatch.setattr("cbatch.grammars.compiling.rewritten", refuse)
    schema = '{"oneOf": [{"type": "string"}, {"enum": [1, 2]}], "not": {"const": "a"}}'

    async def scene() -> None:
        async with validating() as validator:
            for outputs in (
                StructuredOutputs(json=schema),
                StructuredOutputs(grammar=f'start: "a" b\nb: %json {schema}'),
                StructuredOutputs(regex="a", around=f'start: @answer "a" b\nb: %json {schema}'),
            ):
                tried = await validator.check(outputs)
                Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,)).check(tried.spec)

    run(scene())


def test_an_owner_uses_one_worker_and_has_few_grammars_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other owners do not wait for it."""
    running: list[int] = []
    release = asyncio.Event()

    async def held(self: Any, task: Any, limits: TaskLimits) -> Any:
        if "slow" in task.args[0].regex:
            running.append(1)
            await release.wait()
        return validator_module.GrammarVerdict()

    monkeypatch.setattr(WorkerPool, "run", held)

    async def scene() -> None:
        async with validating(max_waiting=3) as validator:
            slow = [
                asyncio.create_task(validator.check(StructuredOutputs(regex=f"slow{i}"), owner="a"))
                for i in range(5)
            ]
            await asyncio.gather(*slow[3:], return_exceptions=True)
            assert all(isinstance(each.exception(), GrammarsBusyError) for each in slow[3:])
            while not running:
                await asyncio.sleep(0.001)
            await validator.check(StructuredOutputs(regex="b"), owner="b")
            assert len(running) == 1, "the others of its own wait for their turn"
            release.set()
            await asyncio.gather(*slow[:3])
            assert len(running) == 3
            await validator.check(StructuredOutputs(regex="slow9"), owner="a")

    run(scene())
