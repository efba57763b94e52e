"""Our own products: what they compute, that company changes no bit, and how they come about."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from cbatch.runtime.cpu.compiled import CompiledProduct, build, compiles
from tests.runtime.marks import needs_compiler


def test_what_it_does_not_compute() -> None:
    assert not compiles(torch.float16)
    with pytest.raises(ValueError, match="weight"):
        CompiledProduct(torch.zeros(8, 48, dtype=torch.float16), None, None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, and a source that takes no time: others call what is compiled of the real."""
    source = tmp_path / "source" / "library.c"
    source.parent.mkdir()
    source.write_text("\n".join(f"int {symbol}(void) {{ return 7; }}" for symbol in build._SYMBOLS))
    monkeypatch.setattr(build, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cbatch" / "compiled"


def loaded() -> ctypes.CDLL:
    found = build.library.__wrapped__()
    assert found is not None and found.lanes() == 7
    return found


def kept(cache: Path) -> Path:
    (found,) = cache.iterdir()
    return found


@needs_compiler
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    file = kept(cache)

    def unwanted(*_: str) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_run", unwanted)
    assert loaded()._name == str(file)


# In a process of its own: what is found broken by loading it may end it.
BROKEN = """
import os, sys
from pathlib import Path
from cbatch.runtime.cpu.compiled import build

build._SOURCE = Path(sys.argv[1])
assert build.library.__wrapped__() is not None
(file,) = Path(sys.argv[2]).iterdir()
whole = file.read_bytes()
flipped = bytearray(whole)
flipped[len(whole) // 2] ^= 1
lengths = [*range(0, len(whole), 1999), 33, 4096, len(whole) - 33, len(whole) - 32, len(whole) - 1]
for content in (*(whole[:length] for length in lengths), flipped, whole + b"more"):
    part = file.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, file)
    assert build.library.__wrapped__().lanes() == 7
    assert file.read_bytes() == whole, len(content)
print("all", len(lengths) + 2)
"""


@needs_compiler
def test_a_file_that_is_not_whole_is_replaced(cache: Path) -> None:
    command = [sys.executable, "-c", BROKEN, str(build._SOURCE), str(cache)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    count = int(run.stdout.split()[1])
    told = [line for line in run.stderr.splitlines() if "cannot be used (it is not whole)" in line]
    assert count > 10 and len(told) == count


@needs_compiler
@pytest.mark.parametrize("trouble", ["no home", "a file", "full"])
def test_without_a_cache_it_is_compiled_for_the_process(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
) -> None:
    if trouble == "no home":
        monkeypatch.setattr(build, "cache_folder", lambda name: None)
    elif trouble == "a file":
        cache.parent.parent.touch()
    else:

        def full(source: object, target: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(os, "replace", full)
    loaded()
    expected = "no home for a cache" if trouble == "no home" else f"{cache} takes no kernels"
    assert expected in caplog.text
    assert not cache.is_dir() or not [*cache.iterdir()]


@needs_compiler
def test_many_processes_may_compile_at_once(cache: Path) -> None:
    script = BROKEN.split("(file,)")[0]
    command = [sys.executable, "-c", script, str(build._SOURCE)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert loaded()._name == str(kept(cache))


# The interpreter itself may lie in a home that is closed to others.
STRANGER = """
import os, sys
from pathlib import Path
from cbatch.core.speculation.cost_model import CostProfile
from cbatch.engine.kept_prices import cached_profile
from cbatch.runtime.cpu.compiled import build

build._SOURCE = Path(sys.argv[1])
os.setuid(12345)
made = CostProfile(tokens=(1, 2), target_s=(1.0, 2.0))
assert build.library.__wrapped__().lanes() == 7 and cached_profile({}, lambda: made) == made
"""


@needs_compiler
@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
@pytest.mark.parametrize("home", [None, "/"])
def test_a_user_without_a_home(cache: Path, home: str | None) -> None:
    """Who is not in the password file, or whose home is not there, or not to be written in."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {} if home is None else {"HOME": home}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        source = shutil.copy(build._SOURCE, folder)
        command = [sys.executable, "-c", STRANGER, source]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    kernels, costs = run.stderr.splitlines()
    assert "compil" in kernels and "step costs" in costs


@pytest.mark.parametrize("trouble", ["no compiler", "fails", "nowhere"])
def test_without_a_compiler_there_is_no_kernel(
    trouble: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "no compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CC", raising=False)
    else:
        monkeypatch.setattr(build, "find_compiler", lambda: "cc")
    if trouble == "fails":

        def fails(*command: str) -> None:
            raise subprocess.CalledProcessError(1, command, stderr=b"library.c:1:\nbad flag\n")

        monkeypatch.setattr(build, "_run", fails)
    if trouble == "nowhere":

        def nowhere(**_: object) -> None:
            raise FileNotFoundError("no usable temporary directory")

        monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
    assert build.library.__wrapped__() is None
    said = {"no compiler": "no C compiler", "fails": "bad flag", "nowhere": "no usable temporary"}
    assert "torch's products compute" in caplog.text and said[trouble] in caplog.text
