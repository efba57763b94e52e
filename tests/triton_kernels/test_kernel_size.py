"""All kernels of a start on an H100: their number, and the code size of each. The table of `python
-m tests.triton_kernels.compile_check` has their compile times."""

from __future__ import annotations

import pytest
import triton
from triton.compiler import ASTSource

from cbatch.demo import demo_paths
from cbatch.runtime.model.checkpoint import open_checkpoint
from tests.gpu_proofs.driver import Specialisation, recording
from tests.gpu_proofs.sizes import LLAMA_1B, LLAMA_8B, Size
from tests.gpu_proofs.steps import Run
from tests.triton_kernels.compile_check import MAX_CODE_BYTES, TARGETS, code_bytes

MAX_KERNELS = 40


def size(name: str) -> Size:
    if name == "demo pair":
        target, draft = (open_checkpoint(path)[0] for path in demo_paths())
        return Size(name, target, draft, 32, 64, 4)
    drafts = {"8B with a draft": (LLAMA_1B, 4), "8B with lookups": (None, 4), "8B": (None, 0)}
    draft, depth = drafts[name]
    return Size(name, LLAMA_8B, draft, 32, 64, depth)


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
    """Steps that are shaped, filtered, drawn, in blocks, of one row or of many use the same one."""
    names = [each.name for each in launched("8B with a draft")]
    for kernel in ("shape", "scan", "distributions", "decide", "residual", "coins", "finish"):
        assert names.count(f"{kernel}_kernel") == 1
