"""Load mutated models until one misbehaves: `python -m tests.runtime.model_fuzz FOLDER SEED COUNT
[FIRST]`.

FIRST is the first mutation to run, to see one again. Each model must be refused by an error of ours
that names it, or serve a prompt, within a limit of processor time. Memory must stay below a GiB
more than before the first. A summary is printed as JSON. A mutation that misbehaves is left in
FOLDER, and its description in the file `at`.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cbatch import LLM, SamplingParams
from cbatch.engine.model_files import chat_template_of
from cbatch.runtime.model.config import ModelError
from cbatch.text import ChatTemplateError, TokenizerError
from tests.gguf_files import gguf_bytes
from tests.runtime.made_models import MADE, gguf_parts, make_directory
from tests.runtime.mutations import GoodFile, good_gguf, good_json, good_safetensors

MAX_S = 1.0
MAX_MORE_BYTES = 1 << 30
ATTEMPTS = 3  # for one that took too long: other processes use the machine too
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "for item in"}]
SERVED = "served"

Make = Callable[[random.Random], tuple[Path, str]]


def outcome(path: Path) -> str:
    """Run all that a server does with a model; return `SERVED` or the message of its refusal."""
    try:
        llm = LLM(path, max_num_seqs=2, num_blocks=16, lookahead="off")
        template = chat_template_of(path)
    except (ModelError, TokenizerError, ChatTemplateError) as error:
        assert str(path) in str(error), f"names no file: {error}"
        return str(error)
    try:
        prompt = "for item in" if template is None else template.render(MESSAGES)
    except ChatTemplateError:
        prompt = "for item in"
    llm.generate(prompt[:100], PARAMS)  # it may be refused, or its logits be not finite
    return SERVED


def mutators(folder: Path) -> list[Make]:
    """Return a mutator for each good model, and check that all of these are served."""
    makers: list[Make] = []
    for name in MADE:
        path, (metadata, tensors) = folder / f"{name}.gguf", gguf_parts(name)
        path.write_bytes(gguf_bytes(metadata, tensors))
        assert outcome(path) == SERVED, name
        last_entry = 16 + 8 * len(list(tensors.values())[-1].shape)
        good = good_gguf(path.read_bytes(), [*metadata, *tensors], last_entry)
        makers.append(partial(_mutated_file, good, path))
    good_folder = folder / "good"
    good_folder.mkdir()
    make_directory(good_folder)
    assert outcome(good_folder) == SERVED
    files = {
        path.name: (good_json if path.suffix == ".json" else good_safetensors)(path.read_bytes())
        for path in sorted(good_folder.iterdir())
    }
    return [*makers, partial(_mutated_directory, good_folder, files, folder / "mutated")]


def _mutated_file(good: GoodFile, path: Path, chosen: random.Random) -> tuple[Path, str]:
    what, content = good.mutated(chosen)
    path.unlink(missing_ok=True)  # a process that has mapped the old file keeps it
    path.write_bytes(content)
    return path, what


def _mutated_directory(
    good: Path, files: dict[str, GoodFile], path: Path, chosen: random.Random
) -> tuple[Path, str]:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(good, path)
    name = chosen.choice(list(files))
    return path, f"{name}: {_mutated_file(files[name], path / name, chosen)[1]}"


def run(folder: Path, seed: int, count: int, first: int = 0) -> dict[str, object]:
    """Return the outcomes of `count` mutations. Raises if one misbehaves."""
    made, slowest_s, refusals = mutators(folder), 0.0, Counter[str]()
    statm = Path("/proc/self/statm").read_text()
    now_bytes = int(statm.split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MAX_MORE_BYTES, resource.RLIM_INFINITY))
    for index in range(first, first + count):
        path, what = made[index % len(made)](random.Random(f"{seed} {index}"))
        (folder / "at").write_text(f"mutation {index} of seed {seed}, {path.name}: {what}")
        took_s, message = min(_timed(path))
        assert took_s <= MAX_S, f"took {took_s:.1f} s: {message}"
        slowest_s = max(slowest_s, took_s)
        refusals[message.replace(str(path), "")[:60]] += 1
    served = refusals.pop(SERVED, 0)
    summary = {"served": served, "refused": refusals.total(), "ways": len(refusals)}
    return summary | {"slowest_s": round(slowest_s, 3)}


def _timed(path: Path) -> Iterator[tuple[float, str]]:
    for _ in range(ATTEMPTS):
        started_s = time.process_time()
        message = outcome(path)
        took_s = time.process_time() - started_s
        yield took_s, message
        if took_s <= MAX_S:
            return


if __name__ == "__main__":
    faulthandler.enable()
    warnings.simplefilter("error")
    print(json.dumps(run(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
