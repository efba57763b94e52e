"""Grammars that exhaust the stack, memory or time of a compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

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
    form = rng.choice(
        [
            '{"$ref":"#/$defs/REF"}',
            '{"items":{"$ref":"#/$defs/REF"}}',
            '{"anyOf":[{"$ref":"#/$defs/REF"},{}]}',
            '{"allOf":[{"$ref":"#/$defs/REF"},{"minItems":1}]}',
        ]
    )
    links = ",".join(f'"{i:x}":{form.replace("REF", f"{i + 1:x}")}' for i in range(n))
    return {"json": f'{{"$defs":{{{links},"{n:x}":{{}}}},"$ref":"#/$defs/0"}}'}


def doubling_references(rng: random.Random) -> Outputs:
    """Return a chain of definitions, each of which refers to the next definition twice."""
    n, word = rng.randrange(20, 200), rng.choice(["allOf", "anyOf", "oneOf"])
    link = {i: {"$ref": f"#/$defs/{i + 1}"} for i in range(n)}
    defs: dict[str, Any] = {str(i): {word: [link[i], link[i]]} for i in range(n)}
    defs[str(n)] = {"type": "string"}
    return {"json": {"$defs": defs, "$ref": "#/$defs/0"}}


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
    return rng.choice(
        [
            {"regex": "(" * n + "a" + ")" * n},
            {"grammar": "start: " + "(" * n + '"a"' + ")" * n},
            {"grammar": "start: " + "[" * n + '"a"' + "]" * n},
            {"grammar": "start: /" + "(" * n + "a" + ")" * n + "/"},
            {"grammar": "root ::= " + "(" * n + '"a"' + ")" * n},
            {"grammar": "start: T\nT: " + "~" * n + "/a/"},
            {"grammar": "start: %json " + '{"items":' * short + "{}" + "}" * short},
            {"json": '{"items":' * short + "{}" + "}" * short},
            {"json": '{"const":' + "[" * n + "]" * n + "}"},
        ]
    )


def alternatives(rng: random.Random) -> Outputs:
    n = rng.randrange(1000, 7000)
    words = [str(i) for i in range(n)]
    names = [f"{i:x}" for i in range(n)]
    return rng.choice(
        [
            {"regex": "|".join("ab"[i % 2] * (i % 50 + 1) for i in range(n // 6))},
            {"choice": words},
            {"choice": ["a" * 60_000]},
            {"json": {"enum": words}},
            {"json": {"type": "object", "properties": {name: {} for name in names}}},
            {
                "json": {
                    "type": "object",
                    "properties": {name: {} for name in names},
                    "required": names,
                }
            },
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
    return rng.choice(
        [
            {"json": {"type": "integer", "maximum": n}},
            {"json": {"type": "integer", "minimum": n}},
            {"json": {"enum": [n, -n]}},
            {"json": {"const": n}},
            {"json": {"type": "number", "multipleOf": abs(n)}},
            {"json": {"type": "string", "maxLength": abs(n)}},
        ]
    )


def broken(rng: random.Random) -> Outputs:
    letters = 'start: "/()[]{}|&~*+?.\\-^$%\n\x00é\U0001f600abc0123'
    text = "".join(rng.choices(letters, k=rng.randrange(1, 400)))
    return rng.choice(
        [
            {"regex": text},
            {"grammar": text},
            {"grammar": f"start: {text}"},
            {"json": text},
            {"json": {"type": text, "pattern": text}},
            {"choice": [text, ""]},
            {"regex": "(?<=a)b\\1(?R)"},
            {"grammar": "start: start"},
            {"json": {"$ref": "#"}},
            {"json": {"$ref": "http://127.0.0.1:9/x.json"}},
        ]
    )


KINDS: dict[str, Callable[[random.Random], Outputs]] = {
    "grammar: rule chain": rule_chain,
    "grammar: terminal chain": terminal_chain,
    "grammar: reference chain": reference_chain,
    "grammar: doubling references": doubling_references,
    "grammar: optional letters": optional_letters,
    "grammar: nested": nested,
    "grammar: alternatives": alternatives,
    "grammar: intersections": intersections,
    "grammar: repetitions": repetitions,
    "grammar: great numbers": great_numbers,
    "grammar: broken": broken,
}


def _lines(n: int, form: str) -> str:
    return "".join(form.format(i=i, j=i + 1) + "\n" for i in range(n))
