"""JSON schemas, rewritten into the part of JSON Schema that llguidance supports.

Every value that is valid by the rewritten schema is valid by the original. A keyword that cannot be
rewritten is rejected, with its place. Annotations and unknown values of `format` are removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import combinations
from typing import Any
from urllib.parse import quote, unquote, urljoin

from cbatch.core.request.errors import FieldError

FIELD = "structured_outputs"
UNIQUE = "x-cbatch-unique"  # key of the properties whose lists must have unique strings
# Keywords by the kind of their value: schemas by name, a list of schemas, one schema, and other
# values, which are not rewritten.
_MAPS = frozenset(["patternProperties", "properties"])
_LISTS = frozenset(["allOf", "anyOf", "items", "oneOf", "prefixItems"])
_SCHEMAS = frozenset(["additionalItems", "additionalProperties", "items"])
_VALUES = frozenset(["maxItems", "maxLength", "maxProperties", "minItems", "minLength", "pattern"])
_VALUES |= {"minProperties", "multipleOf", "required", "type"}
_REFUSED = {"$dynamicRef", "$recursiveRef", "contains", "unevaluatedItems", "unevaluatedProperties"}
_FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time"])
_FORMATS |= {"uri", "uuid"}
_BOUND_SIGNS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}
_LIST_PROPERTY = re.compile(r"/properties/([^/]*)(?:/(?:allOf|anyOf|oneOf)/[0-9]+)*$")
_LOOKAROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
# llguidance parses numbers as doubles, and supports integers of 64 bits.
_MAX_EXACT = 2**53  # doubles represent all integers up to this number
_MAX_INT64_DOUBLE = 2**63 - 2**10  # the largest double within 64 bits


def rewritten(schema: Schema, name: str = "json") -> dict[str, Any]:
    """Return `schema` for llguidance. `UNIQUE` lists the properties with lists of unique strings.
    Errors call the schema `name`. Raises `FieldError`, RecursionError."""
    rewriter = _Rewriter(schema, name)
    root, definitions = rewriter.rewrite(schema, "#"), dict[str, Schema]()
    while len(definitions) < len(rewriter.references):
        reference = list(rewriter.references)[len(definitions)]
        definitions[reference.removeprefix("#")] = rewriter.rewrite(
            rewriter.target(reference), reference
        )
    root = root if isinstance(root, dict) else {"allOf": [root]}
    return {**root, "$defs": definitions, UNIQUE: list(rewriter.unique)}


class _Rewriter:
    def __init__(self, root: Schema, name: str) -> None:
        self._root, self._name = root, name
        self._base = str(root.get("$id", "")).rstrip("#") if isinstance(root, dict) else ""
        self.references: dict[str, None] = {}
        self.unique: dict[str, None] = {}
        self._sets = SchemaSets(self.target)

    @cached_property
    def _named(self) -> dict[str, Schema]:
        """Schemas by the references that their `$id` or `$anchor` defines; the root is ``""``."""
        named, nodes = {"": self._root, self._base: self._root}, [self._root]
        for node in nodes:  # the loop appends to the list
            if isinstance(node, dict) and node is not self._root:
                for key, sign in (("$id", ""), ("id", ""), ("$anchor", "#")):
                    if isinstance(node.get(key), str):
                        named[urljoin(self._base, sign + node[key])] = node
            nodes += node.values() if isinstance(node, dict) else ()
            nodes += node if isinstance(node, list) else ()
        return named

    def target(self, reference: str) -> Schema:
        try:
            base, _, way = unquote(reference).partition("#/")
            schema = self._named[urljoin(self._base, base) if base.strip("#") else ""]
            for step in way.split("/") if way else ():
                step = step.replace("~1", "/").replace("~0", "~")
                schema = schema[int(step) if isinstance(schema, list) else step]
            return schema
        except (KeyError, IndexError, TypeError, ValueError) as error:
            remedy = "put it under $defs: #/$defs/NAME"
            problem = "is not within the schema"
            raise self._refusal(f"$ref {reference}", problem, remedy) from error

    def rewrite(self, node: Schema, at: str, within: Schema = True) -> Schema:
        """Rewrite the schema at place `at`. A valid value must also be valid by `within`."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise self._refusal(at, "is not a JSON schema", "give an object, true or false")
        node = dict(node)
        clauses = self._replace_keywords(node, at, within)
        if clauses:
            node["allOf"] = [*node.get("allOf", ()), *clauses]
        outer = {k: node[k] for k in ("type", "required", "properties") if k in node}
        result: dict[str, Any] = {}
        for keyword, value in node.items():
            place = f"{at}/{keyword}"
            if keyword in _MAPS and isinstance(value, dict):
                result[keyword] = {k: self.rewrite(v, f"{place}/{k}") for k, v in value.items()}
            elif keyword in _LISTS and isinstance(value, list):
                inner = outer if keyword == "allOf" else True
                result[keyword] = [
                    self.rewrite(v, f"{place}/{k}", inner) for k, v in enumerate(value)
                ]
            elif keyword in _SCHEMAS:
                inner = self.rewrite(value, place)
                if inner not in (True, {}):
                    result[keyword] = inner
            elif keyword in _BOUND_SIGNS:
                result[keyword] = self._representable(value, place, _BOUND_SIGNS[keyword])
            elif keyword == "$ref":
                self.references[value] = None
                name = str(value).removeprefix("#").replace("~", "~0").replace("/", "~1")
                result[keyword] = f"#/$defs/{quote(name, safe='~')}"
            elif keyword in ("const", "enum"):
                result[keyword] = self._exact(value, place)
            elif keyword == "pattern" and _LOOKAROUND.search(str(value)):
                raise self._refusal(
                    place, "has lookaround", "write it without (?=, (?!, (?<=, (?<!"
                )
            elif keyword in _VALUES or (keyword == "format" and value in _FORMATS):
                result[keyword] = value
            elif keyword in _REFUSED:
                raise self._refusal(place, "is not supported", "leave it out")
        return result

    def _refusal(self, place: str, problem: str, remedy: str) -> FieldError:
        return FieldError(FIELD, f"{self._name}: {place[:200]}: {problem}", remedy)

    # ---- keywords that llguidance does not support ------------------------------------------

    def _replace_keywords(self, node: dict[str, Any], at: str, within: Schema) -> list[Schema]:
        clauses: list[Schema] = []
        context = [{k: v for k, v in node.items() if k not in ("oneOf", "not", "if")}, within]
        if "oneOf" in node:
            node["oneOf"] = self._exclusive(node["oneOf"], f"{at}/oneOf", *context)
        if "not" in node:
            clauses.append(self._complement(node["not"], f"{at}/not", *context))
        if "if" in node and node.keys() & {"then", "else"}:
            then = {"allOf": [node["if"], node.get("then", True)]}
            otherwise = [self._complement(node["if"], f"{at}/if", *context), node.get("else", True)]
            clauses.append({"anyOf": [then, {"allOf": otherwise}]})
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, needed in node.get(keyword, {}).items():
                needed = {"required": needed} if isinstance(needed, list) else needed
                present = {"required": [name], "allOf": [needed]}
                clauses.append({"anyOf": [{"properties": {name: False}}, present]})
        if "propertyNames" in node:
            self._limit_names(node, f"{at}/propertyNames")
        if node.get("uniqueItems") is True and node.get("maxItems", 2) > 1:
            name, items = _LIST_PROPERTY.search(at), node.get("items", True)
            if name is None or not self._sets.empty(items, {"type": sorted(TYPES - {"string"})}):
                problem = "is only supported for lists of strings that are properties"
                raise self._refusal(f"{at}/uniqueItems", problem, "leave it out")
            self.unique[name[1]] = None
        return clauses

    def _exclusive(self, branches: list[Schema], at: str, *context: Schema) -> list[Schema]:
        results: list[list[Schema]] = [[branch] for branch in branches]
        for pair in combinations(range(len(branches)), 2):
            if self._sets.empty(*(branches[number] for number in pair), *context):
                continue
            for index, other in (pair, pair[::-1]):
                complements = self._possible_complements(branches[other], branches[index], *context)
                if not complements:
                    problem = f"values may be valid by both {index} and {other}"
                    remedy = "give each a required const of its own, or use anyOf"
                    raise self._refusal(at, problem, remedy)
                results[index].append({"anyOf": complements[: 3 if len(branches) < 5 else 1]})
        return [{"allOf": parts} if parts[1:] else parts[0] for parts in results]

    def _possible_complements(self, schema: Schema, *context: Schema) -> list[Schema]:
        schemas = self._sets.complements(schema)
        return [each for each in schemas if not self._sets.empty(each, *context)]

    def _complement(self, schema: Schema, at: str, *context: Schema) -> Schema:
        complements = self._possible_complements(schema, *context)
        if complements or self.rewrite(schema, at) in (True, {}):
            return {"anyOf": complements} if complements else False
        raise self._refusal(at, "its negation is not supported", "say what is valid instead")

    def _limit_names(self, node: dict[str, Any], at: str) -> None:
        """Replace `propertyNames` by other keywords. Raises `FieldError`."""
        names = node["propertyNames"]
        if isinstance(names, dict) and "$ref" in names:
            names = self.target(names["$ref"])
        names, named = self.rewrite(names, at), node.get("properties", {})
        if names in (True, {}, {"type": "string"}):
            return
        others = node.get("additionalProperties", True)
        if node.get("patternProperties", {}).keys() == {".*"}:
            others = node.pop("patternProperties")[".*"]
        plain = "patternProperties" not in node and (others in (True, False) or not named)
        if not plain or names.keys() - {"type"} not in ({"enum"}, {"pattern"}):
            raise self._refusal(at, "is not supported here", "use properties, patternProperties")
        pattern = names.get("pattern") or f"^({'|'.join(map(re.escape, names['enum']))})$"
        node["properties"] = {k: v if re.search(pattern, k) else False for k, v in named.items()}
        if others is not False:
            node |= {"patternProperties": {pattern: others}, "additionalProperties": False}

    # ---- numbers ----------------------------------------------------------------------------

    def _representable(self, bound: Any, place: str, sign: int) -> Any:
        """Return `bound`, moved inwards if llguidance cannot represent it. The excluded numbers are
        too large to matter."""
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            return bound  # a boolean, as in old drafts of JSON Schema, or invalid
        if -sign * bound > _MAX_EXACT:
            raise self._range_error(bound, place)
        if sign * bound <= _MAX_EXACT:
            return bound
        inner = min(sign * bound, _MAX_INT64_DOUBLE)
        double = float(inner)
        return sign * int(double if double <= inner else math.nextafter(double, 0))

    def _exact(self, value: Any, place: str) -> Any:
        if isinstance(value, int) and abs(value) > _MAX_EXACT:
            raise self._range_error(value, place)
        inner = value.values() if isinstance(value, dict) else value
        for part in inner if isinstance(value, dict | list) else ():
            self._exact(part, place)
        return value

    def _range_error(self, value: float, place: str) -> FieldError:
        remedy = f"use one within {_MAX_EXACT}, or a pattern of digits in a string"
        return self._refusal(place, f"{str(value)[:80]} is outside the supported range", remedy)


Schema = Any  # a JSON object, true or false
_NUMBER = frozenset(("fraction", "integer"))
TYPES = _NUMBER | {"array", "boolean", "null", "object", "string"}
_NAMES: dict[type, str] = {bool: "boolean", str: "string", list: "array", dict: "object"}
_MAX_DEPTH = 4  # levels of references and nested schemas that are followed
MAX_PARTS = 50_000  # parts that all calls on one schema may visit: a bound on time


class SchemaSets:
    """Emptiness and complements of schemas. `target` returns the schema that a `$ref` names."""

    def __init__(self, target: Callable[[str], Schema]) -> None:
        self._target = target
        self._budget = MAX_PARTS

    def parts(self, schema: Schema, depth: int) -> Iterator[dict[str, Any]]:
        """Yield schemas whose conjunction equals `schema`: itself, and the schemas of its `allOf`
        and `$ref`. False becomes an empty `enum`; True yields nothing."""
        self._budget -= 1
        if isinstance(schema, dict):
            yield schema
        elif not schema:
            yield {"enum": []}
        if isinstance(schema, dict) and depth < _MAX_DEPTH and self._budget > 0:
            for inner in schema.get("allOf", ()):
                yield from self.parts(inner, depth + 1)
            if "$ref" in schema:
                yield from self.parts(self._target(schema["$ref"]), depth + 1)

    def empty(self, *schemas: Schema, depth: int = 0) -> bool:
        """Return True if no value is valid by all of the schemas. False may mean undecided."""
        parts = [part for schema in schemas for part in self.parts(schema, depth)]
        types = TYPES.intersection(*map(_types, parts))
        values = [each for each in map(_values, parts) if each is not None]
        if not types or (values and not any(all(v in each for each in values) for v in values[0])):
            return True
        if depth >= _MAX_DEPTH or self._budget <= 0:
            return False
        for part in parts:
            others = [other for other in parts if other is not part]
            for choices in _choices(part):
                if all(self.empty(each, *others, depth=depth + 1) for each in choices):
                    return True
        names = dict.fromkeys(name for part in parts for name in part.get("required", ()))
        return types == {"object"} and any(
            self.empty(*_property(parts, name), depth=depth + 1) for name in names
        )

    def complements(self, schema: Schema, depth: int = 0) -> list[Schema]:
        """Return schemas whose values are all invalid by `schema`; [] if none is known."""
        schemas: list[Schema] = []
        for part in self.parts(schema, depth) if depth < _MAX_DEPTH else ():
            schemas += (
                {"type": "object", "properties": {name: False}} for name in part.get("required", ())
            )
            schemas += (
                {"type": "object", "required": [name], "properties": {name: complement}}
                for name, inner in part.get("properties", {}).items()
                for complement in self.complements(inner, depth + 1)
            )
            schemas += [*_of_types(TYPES - _types(part)), *_other_values(_values(part) or [])]
            for choices in _choices(part):
                sides = [self.complements(each, depth + 1) for each in choices]
                if all(sides):
                    schemas.append({"allOf": [{"anyOf": side} for side in sides]})
            if "not" in part:
                schemas.append(part["not"])
        return schemas


def _choices(part: dict[str, Any]) -> list[list[Schema]]:
    return [part[keyword] for keyword in ("anyOf", "oneOf") if keyword in part]


def _values(part: dict[str, Any]) -> list[Any] | None:
    return [part["const"]] if "const" in part else part.get("enum")


def _type_of(value: Any) -> str:
    if type(value) in (int, float):
        return "integer" if value % 1 == 0 else "fraction"
    return _NAMES.get(type(value), "null")


def _types(part: dict[str, Any]) -> frozenset[str]:
    """Return the possible types of a value. A number is an "integer" or a "fraction"."""
    kind, values = part.get("type", TYPES), _values(part)
    types = frozenset([kind] if isinstance(kind, str) else kind)
    types = types | _NUMBER if "number" in types else types
    return types if values is None else types & frozenset(map(_type_of, values))


def _of_types(types: frozenset[str]) -> list[Schema]:
    """Return schemas of `types`. JSON Schema has no type for fractions alone: they are left out."""
    names = types - _NUMBER | ({"number"} if types >= _NUMBER else types & {"integer"})
    return [{"type": sorted(names)}] if names else []


def _other_values(values: list[Any]) -> list[Schema]:
    texts = [value for value in values if isinstance(value, str)]
    truths = {value for value in values if isinstance(value, bool)}
    schemas: list[Schema] = [{"const": not truth} for truth in truths if len(truths) == 1]
    if texts:
        schemas.append({"type": "string", "pattern": f"^{_other_than(texts)}$"})
    return schemas


def _other_than(texts: list[str]) -> str:
    """Return a regular expression of all texts except `texts`."""
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(f"\\u{{{ord(text[0]):x}}}", []).append(text[1:])
    patterns = [f"[^{''.join(rests)}][\\s\\S]*"] if rests else ["[\\s\\S]+"]
    patterns += [first + _other_than(rest) for first, rest in rests.items()]
    return f"({'|'.join(patterns)}){'' if '' in texts else '?'}"


def _property(parts: list[dict[str, Any]], name: str) -> Iterator[Schema]:
    for part in parts:
        if name in part.get("properties", {}):
            yield part["properties"][name]
        elif "patternProperties" not in part:
            yield part.get("additionalProperties", True)
