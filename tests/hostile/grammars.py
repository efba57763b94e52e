"""Grammars that exhaust the stack, memory or time of a compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.hostile.attacker import ATTACKS, Attack, Target

Outputs = dict[str, Any]  # as `structured_outputs`


def rule_chain(rng: random.Random) -> Outputs:
    n = rng.randrange(2800, 4000)
    if rng.random() < 0.5:
        return {"grammar": "start: r0\n" + _lines(n, "r{i}: r{j}") + f'r{n}: "a"'}
    return {"grammar": "root ::= r0\n" + _lines(n, "r{i} ::= r{j}") + f'r{n} ::= "a"'}


def terminal_chain(rng: random.Random) -> Outputs:
    n = rng.randrange(3000, 4200)
    wrap = rng.choice(["T{i}: ~T{j}", 'T{i}: "a" T{j}', "T{i}: T{j}"])
    return {"grammar": "start: T0\n" + _lines(n, wrap) + f'T{n}: "a"'}


def reference_chain(rng: random.Random) -> Outputs:
    n = rng.randrange(900, 1400)
    reference = '{"$ref":"#/$defs/REF"}'
    wraps = ["%s", '{"items":%s}', '{"anyOf":[%s,{}]}', '{"allOf":[%s,{"minItems":1}]}']
    form = rng.choice(wraps) % reference
    links = ",".join(f'"{i:x}":{form.replace("REF", f"{i + 1:x}")}' for i in range(n))
    return {"json": f'{{"$defs":{{{links},"{n:x}":{{}}}},"$ref":"#/$defs/0"}}'}


def doubling_references(rng: random.Random) -> Outputs:
    """Return a chain of definitions, each of which refers to the next definition twice."""
    n, word = rng.randrange(20, 200), rng.choice(["allOf", "anyOf", "oneOf"])
    defs: dict[str, Any] = {str(i): {word: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(n)}
    return {"json": {"$defs": defs | {str(n): {"type": "string"}}, "$ref": "#/$defs/0"}}


def optional_letters(rng: random.Random) -> Outputs:
    """Return a legal grammar whose time grows with the square of its length."""
    part = rng.choice(["a?", "a?", "a?", "(a|b)?", "a*b?", "[a-z]{0,9}"])
    text = part * (rng.choice([16_000, 64_000]) // len(part))
    if rng.random() < 0.3:
        return {"json": {"type": "string", "pattern": f"^{text}$"}}
    return {"regex": text}


def nested(rng: random.Random) -> Outputs:
    n = rng.choice([300, 3000, 30_000])
    short = min(n, 7000)  # nine characters a level
    items = '{"items":' * short + "{}" + "}" * short
    text = "(" * n + "%s" + ")" * n
    return rng.choice(
        [
            {"regex": text % "a"},
            {"grammar": "start: " + text % '"a"'},
            {"grammar": "start: " + "[" * n + '"a"' + "]" * n},
            {"grammar": "start: /" + text % "a" + "/"},
            {"grammar": "root ::= " + text % '"a"'},
            {"grammar": "start: T\nT: " + "~" * n + "/a/"},
            {"grammar": "start: %json " + items},
            {"json": items},
            {"json": '{"const":' + "[" * n + "]" * n + "}"},
        ]
    )


def alternatives(rng: random.Random) -> Outputs:
    n = rng.randrange(1000, 7000)
    words = [str(i) for i in range(n)]
    members: dict[str, Any] = {"type": "object", "properties": {f"{i:x}": {} for i in range(n)}}
    return rng.choice(
        [
            {"regex": "|".join("ab"[i % 2] * (i % 50 + 1) for i in range(n // 6))},
            {"choice": words},
            {"choice": ["a" * 60_000]},
            {"json": {"enum": words}},
            {"json": members},
            {"json": members | {"required": list(members["properties"])}},
            {"json": {"type": "array", "prefixItems": [{}] * n}},
        ]
    )


def intersections(rng: random.Random) -> Outputs:
    n = rng.randrange(10, 6000)
    part = rng.choice(["/[ab]*/", "/a.*b/", "/(aa|b)*/", "~/ab/"])
    return {"grammar": "start: T\nT: " + " & ".join([part] * min(n, 60_000 // (len(part) + 3)))}


def repetitions(rng: random.Random) -> Outputs:
    n = rng.choice([1000, 100_000, 2**31, 2**63, 2**70])
    return rng.choice(
        [
            {"regex": f"a{{{n}}}"},
            {"regex": f"((a{{1,{n}}}){{1,{n}}}){{1,{n}}}"},
            {"json": {"type": "string", "minLength": n}},
            {"json": {"type": "array", "items": {"enum": [1]}, "minItems": n}},
            {"json": {"type": "object", "minProperties": n}},
        ]
    )


def great_numbers(rng: random.Random) -> Outputs:
    """Return numbers that fit in 256 bits."""
    n = rng.choice([2**63, 2**64, 10**30, 2**256 - 1, 10**300, -(10**30)])
    schemas: list[Outputs] = [{"type": "integer", "maximum": n}, {"type": "integer", "minimum": n}]
    schemas += [{"enum": [n, -n]}, {"const": n}, {"type": "number", "multipleOf": abs(n)}]
    return {"json": rng.choice([*schemas, {"type": "string", "maxLength": abs(n)}])}


def broken(rng: random.Random) -> Outputs:
    letters = 'start: "/()[]{}|&~*+?.\\-^$%\n\x00é\U0001f600abc0123'
    text = "".join(rng.choices(letters, k=rng.randrange(1, 400)))
    schemas = [text, {"type": text, "pattern": text}, {"$ref": "#"}]
    return rng.choice(
        [
            *({"json": schema} for schema in (*schemas, {"$ref": "http://127.0.0.1:9/x.json"})),
            *({"grammar": grammar} for grammar in (text, f"start: {text}", "start: start")),
            *({"regex": text}, {"regex": "(?<=a)b\\1(?R)"}, {"choice": [text, ""]}),
        ]
    )


def _lines(n: int, form: str) -> str:
    return "".join(form.format(i=i, j=i + 1) + "\n" for i in range(n))


def _send(make: Callable[[random.Random], Outputs]) -> Attack:
    """Return an attack that sends a grammar in a field that accepts one."""

    def run(target: Target) -> None:
        outputs = make(target.rng)
        schema = outputs.get("json")
        if not isinstance(schema, dict) or target.rng.random() >= 0.4:
            target.post({"prompt": "x", "max_tokens": 4, "structured_outputs": outputs})
            return
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        fields = [{"response_format": shape}, {"tools": [tool], "tool_choice": "required"}]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        target.post(body | target.rng.choice(fields), "/v1/chat/completions")

    return Attack(run, "200 400", large=False)


for _make in (
    *(rule_chain, terminal_chain, reference_chain, doubling_references, optional_letters, nested),
    *(alternatives, intersections, repetitions, great_numbers, broken),
):
    ATTACKS[f"grammar: {_make.__name__.replace('_', ' ')}"] = _send(_make)
