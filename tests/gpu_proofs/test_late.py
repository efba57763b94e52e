"""Kernels that few requests need are listed separately. The others are all that plain requests
launch, and a request waits only for kernels that it launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.compiler import ASTSource
from triton.runtime import driver

from cbatch.core.request.request import SamplingParams
from cbatch.demo import demo_paths
from cbatch.runtime.gpu import capture
from cbatch.runtime.gpu.capture import GROUPS, SHAPED, groups_of, groups_of_key
from cbatch.runtime.gpu.device import CudaDevice
from cbatch.runtime.model.checkpoint import open_checkpoint
from tests.gpu_proofs.driver import Launches, Specialisation, _Driver, recording
from tests.gpu_proofs.meta import MetaDevice
from tests.gpu_proofs.sizes import LLAMA_1B, LLAMA_8B, USUAL, Size
from tests.gpu_proofs.steps import KINDS, Run, late
from tests.triton_kernels.compile_check import MAX_CODE_BYTES, TARGETS, code_bytes

MAX_KERNELS = 40
NO_DRAFT = USUAL[3]
NAMES = {"shape_kernel", "count_kernel"}
PLAIN = [kind for kind, params in KINDS.items() if not groups_of(SamplingParams(**params))]


def size(name: str) -> Size:
    if name == "demo pair":
        target, draft = (open_checkpoint(path)[0] for path in demo_paths())
        return Size(name, target, draft, 32, 64, 4)
    drafts = {"8B with a draft": (LLAMA_1B, 4), "8B with lookups": (None, 4), "8B": (None, 0)}
    draft, depth = drafts[name]
    return Size(name, LLAMA_8B, draft, 32, 64, depth)


def names(keys: Iterable[str]) -> set[str]:
    return {key.split(" ")[0].rpartition(".")[2] for key in keys}


class Listed(BaseException):
    """A list of kernels, in place of compiling them."""

    def __init__(self, by_group: Any = None) -> None:
        self.by_group = by_group
        if by_group is not None:
            raise self


def by_name(*sizes: Size) -> Any:
    return pytest.mark.parametrize("size", sizes, ids=lambda size: size.name)


@by_name(size("8B with a draft"), USUAL[4], NO_DRAFT)
def test_the_parts_together_are_all_kernels_of_a_start(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MetaDevice, "kernels_of", CudaDevice.kernels_of)
    monkeypatch.setattr(driver, "_active", _Driver(TARGETS["sm_90"]))
    monkeypatch.setattr(capture, "UncompiledKernels", Listed)
    executor = Run(size, "sm_90", Launches()).executor
    with pytest.raises(Listed) as listed:
        executor.capture()
    assert len(listed.value.by_group) == 1
    every = listed.value.by_group[frozenset()]
    with pytest.raises(Listed) as listed:
        executor.capture(frozenset())
    by_group = listed.value.by_group
    first = by_group[frozenset()]
    shaped = by_group.get(frozenset((SHAPED,)), {})
    assert len(first) > 10 and every.keys() >= (first | shaped).keys()
    assert names(shaped.keys() - first.keys()) == NAMES


class Pending:
    """Kernels that are not compiled yet."""

    pending = GROUPS

    def __init__(self, by_group: Any = None) -> None: ...


@by_name(USUAL[0], NO_DRAFT)
def test_plain_requests_launch_the_first_part_alone(
    size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "UncompiledKernels", Pending)
    assert len(PLAIN) > 6
    with recording(TARGETS["sm_90"]) as launches:
        run = Run(size, "sm_90", launches)
        run.capture(frozenset())
        assert {group for key in run.device.captured for group in groups_of_key(key)} == set()
        for kind in PLAIN:
            run.serve(kind)
        assert late(launches) == []
        run.serve("shaped")
        assert {each.split(":")[0] for each in late(launches)} == NAMES


def test_a_request_waits_for_what_its_steps_launch() -> None:
    with recording(TARGETS["sm_90"]) as launches:
        run = Run(USUAL[0], "sm_90", launches)
        run.capture()
        for kind, params in KINDS.items():
            run.device.replayed.clear()
            run.serve(kind)
            met = frozenset().union(*map(groups_of_key, run.device.replayed))
            assert met == groups_of(SamplingParams(**params)), kind


def test_groups_of_parameters() -> None:
    for plain in ({}, {"top_k": 4, "seed": 1}, {"logprobs": 5, "prompt_logprobs": 2}):
        assert groups_of(SamplingParams(**plain)) == set()
    for shaped in ({"allowed_token_ids": (1,)}, {"banned_token_ids": (1,)}, {"min_tokens": 2}):
        assert groups_of(SamplingParams(**shaped)) == {SHAPED}


def test_a_step_with_late_kernels_is_captured_once_it_is_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, replayed = CudaDevice.__new__(CudaDevice), []
    device.graphs = {}

    def capture(key: Hashable, work: Callable[[], None]) -> None:
        work()
        device.graphs[key] = SimpleNamespace(replay=lambda: replayed.append(key))

    def failing() -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(device, "capture", capture)
    for key in ("late", "late", "large", "large"):
        device.deferred = {"late"}
        with pytest.raises(RuntimeError, match="does not compile"):
            device.run(key, failing)
        assert device.graphs == {}
    for key in ("late", "late", "large", "large"):
        device.run(key, lambda: None)
    assert [*device.graphs] == replayed == ["late"]


# --- kernels of a start: their number, and the code size of each ---------------------------------


def launched(name: str) -> list[Specialisation]:
    """Return all kernels that an executor compiles before it serves, for every kind of step."""
    with recording(TARGETS["sm_90"]) as launches:
        Run(size(name), "sm_90", launches).capture()
    return [each for _, each in launches.specialisations.values()]


_built: dict[str, int] = {}


def built(specialisation: Specialisation) -> int:
    """Return bytes of code; code that two shapes share is compiled once."""
    if specialisation.key not in _built:
        source = ASTSource(
            specialisation.kernel,
            specialisation.signature,
            specialisation.constexprs,
            specialisation.attributes,
        )
        compiled = triton.compile(source, target=TARGETS["sm_90"], options=specialisation.options)
        _built[specialisation.key] = code_bytes(compiled)
    return _built[specialisation.key]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["8B with a draft", "8B with lookups", "8B", "demo pair"])
def test_a_start_has_few_kernels_and_none_is_large(name: str) -> None:
    kernels = launched(name)
    assert 10 < len(kernels) <= MAX_KERNELS
    large = {each.name: built(each) for each in kernels if built(each) > MAX_CODE_BYTES}
    assert large == {}


def test_one_specialisation_of_each_kernel_that_samples() -> None:
    """Steps that are shaped, filtered, drawn, of one row or of many use the same one."""
    names = [each.name for each in launched("8B with a draft")]
    for kernel in ("shape", "scan", "distributions", "decide", "residual", "finish"):
        assert names.count(f"{kernel}_kernel") == 1
