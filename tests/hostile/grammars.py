"""Grammars that exhaust the stack, memory or time of a compiler."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.hostile.attacker import ATTACKS, CHAT, Attack, Target

Outputs = dict[str, Any]  # as `structured_outputs`


def chains(rng: random.Random) -> list[Outputs]:
    """Return rules, terminals and references, each of which names the next, one of them twice."""
    n, m = rng.randrange(2800, 4200), rng.randrange(900, 1400)
    wrap = rng.choice(["T{i}: ~T{j}", 'T{i}: "a" T{j}', "T{i}: T{j}"])
    forms = ["%s", '{"items":%s}', '{"anyOf":[%s,{}]}', '{"allOf":[%s,{"minItems":1}]}']
    form = rng.choice(forms) % '{"$ref":"#/$defs/REF"}'
    links = ",".join(f'"{i:x}":{form.replace("REF", f"{i + 1:x}")}' for i in range(m))
    count, word = rng.randrange(20, 200), rng.choice(["allOf", "anyOf", "oneOf"])
    defs: Outputs = {str(i): {word: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(count)}
    return [
        {"grammar": "start: r0\n" + _lines(n, "r{i}: r{j}") + f'r{n}: "a"'},
        {"grammar": "root ::= r0\n" + _lines(n, "r{i} ::= r{j}") + f'r{n} ::= "a"'},
        {"grammar": "start: T0\n" + _lines(n, wrap) + f'T{n}: "a"'},
        {"json": f'{{"$defs":{{{links},"{m:x}":{{}}}},"$ref":"#/$defs/0"}}'},
        {"json": {"$defs": defs | {str(count): {"type": "string"}}, "$ref": "#/$defs/0"}},
    ]


def nested(rng: random.Random) -> list[Outputs]:
    n = rng.choice([300, 3000, 30_000])
    short = min(n, 7000)  # nine characters a level
    items = '{"items":' * short + "{}" + "}" * short
    text = "(" * n + "%s" + ")" * n
    starts = [text % '"a"', "[" * n + '"a"' + "]" * n, "/" + text % "a" + "/", "%json " + items]
    return [
        {"regex": text % "a"},
        *({"grammar": "start: " + each} for each in starts),
        {"grammar": "root ::= " + text % '"a"'},
        {"grammar": "start: T\nT: " + "~" * n + "/a/"},
        {"json": items},
        {"json": '{"const":' + "[" * n + "]" * n + "}"},
    ]


def many_parts(rng: random.Random) -> list[Outputs]:
    """Return alternatives, intersections, and legal grammars whose time grows with the square of
    their length."""
    n, m = rng.randrange(1000, 7000), rng.randrange(10, 6000)
    words = [str(i) for i in range(n)]
    members: dict[str, Any] = {"type": "object", "properties": {f"{i:x}": {} for i in range(n)}}
    part = rng.choice(["/[ab]*/", "/a.*b/", "/(aa|b)*/", "~/ab/"])
    option = rng.choice(["a?", "(a|b)?", "a*b?", "[a-z]{0,9}"])
    text = option * (rng.choice([16_000, 64_000]) // len(option))
    return [
        *({"regex": text}, {"json": {"type": "string", "pattern": f"^{text}$"}}),
        {"regex": "|".join("ab"[i % 2] * (i % 50 + 1) for i in range(n // 6))},
        *({"choice": words}, {"choice": ["a" * 60_000]}, {"json": {"enum": words}}),
        *({"json": members}, {"json": members | {"required": list(members["properties"])}}),
        {"json": {"type": "array", "prefixItems": [{}] * n}},
        {"grammar": "start: T\nT: " + " & ".join([part] * min(m, 60_000 // (len(part) + 3)))},
    ]


def great_numbers(rng: random.Random) -> list[Outputs]:
    n = rng.choice([1000, 100_000, 2**31, 2**63, 2**70, 2**256 - 1, 10**300])
    schemas: list[Outputs] = [{"type": "integer", "maximum": n}, {"type": "integer", "minimum": -n}]
    schemas += [{"enum": [n, -n]}, {"const": n}, {"type": "number", "multipleOf": n}]
    schemas += [{"type": "string", "maxLength": n}, {"type": "string", "minLength": n}]
    schemas += [{"type": "array", "items": {"enum": [1]}, "minItems": n}]
    schemas += [{"type": "object", "minProperties": n}]
    regexes = [f"a{{{n}}}", f"((a{{1,{n}}}){{1,{n}}}){{1,{n}}}"]
    return [*({"json": each} for each in schemas), *({"regex": each} for each in regexes)]


def broken(rng: random.Random) -> list[Outputs]:
    letters = 'start: "/()[]{}|&~*+?.\\-^$%\n\x00é\U0001f600abc0123'
    text = "".join(rng.choices(letters, k=rng.randrange(1, 400)))
    schemas = [text, {"type": text, "pattern": text}, {"$ref": "#"}]
    return [
        *({"json": schema} for schema in (*schemas, {"$ref": "http://127.0.0.1:9/x.json"})),
        *({"grammar": grammar} for grammar in (text, f"start: {text}", "start: start")),
        *({"regex": text}, {"regex": "(?<=a)b\\1(?R)"}, {"choice": [text, ""]}),
    ]


def _lines(n: int, form: str) -> str:
    return "".join(form.format(i=i, j=i + 1) + "\n" for i in range(n))


def _send(make: Callable[[random.Random], list[Outputs]], target: Target) -> None:
    """Send two grammars in a field that accepts them."""
    for outputs in target.rng.sample(make(target.rng), 2):
        schema = outputs.get("json")
        if not isinstance(schema, dict) or target.rng.random() >= 0.4:
            target.post({"prompt": "x", "max_tokens": 4, "structured_outputs": outputs})
            continue
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        fields = [{"response_format": shape}, {"tools": [tool], "tool_choice": "required"}]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        target.post(body | target.rng.choice(fields), CHAT)


for _make in (chains, nested, many_parts, great_numbers, broken):
    _name = f"grammar: {_make.__name__.replace('_', ' ')}"
    ATTACKS[_name] = Attack(partial(_send, _make), "200 400", large=False)
