"""Our own products: their values, that other rows change no bit, and how they are compiled."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cbatch.runtime.compiled import build, builds, compiler, find_compiler
from cbatch.runtime.compiled.compiler import Compiler
from tests.runtime.marks import needs_compiler, without_compilers


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache, and a source that compiles at once; other code still calls the real
    library."""
    source = tmp_path / "source" / "library.c"
    source.parent.mkdir()
    source.write_text("\n".join(f"int {symbol}(void) {{ return 7; }}" for symbol in build.SYMBOLS))
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cbatch" / "compiled"


def loaded() -> ctypes.CDLL:
    library = build.library.__wrapped__()
    assert library is not None and library.lanes() == 7
    return library


def kept(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


@needs_compiler
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded()
    file = kept(cache)

    def unwanted(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(Compiler, "run", unwanted)
    assert loaded()._name == str(file)


@needs_compiler
@pytest.mark.parametrize("spoiled", ["file", "folder", "folder above", "link"])
def test_a_library_that_others_could_write_is_not_loaded(
    cache: Path, spoiled: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded()
    file = kept(cache)
    if spoiled == "link":
        outside = cache.parent.parent.parent / "outside"
        outside.mkdir()
        cache.rename(outside / "compiled").chmod(0o777)
        cache.symlink_to(outside / "compiled")
    else:
        {"file": file, "folder": cache, "folder above": cache.parent}[spoiled].chmod(0o777)
    before = file.stat().st_ino
    name = loaded()._name
    assert "others can write" in caplog.text and "compil" in caplog.text
    if spoiled == "file":
        assert file.stat().st_ino != before, "it is replaced"
    else:
        assert not Path(name).is_relative_to(cache) and file.stat().st_ino == before


@needs_compiler
def test_another_processor_has_a_file_of_its_own(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several machines may share a home directory; processors differ in instruction scheduling,
    too."""
    loaded()
    file, features = kept(cache), builds.cpu_features()
    monkeypatch.setattr(builds, "cpu_features", lambda: f"{features} newest")
    assert loaded()._name != str(file) and len([*cache.iterdir()]) == 2
    monkeypatch.setattr(builds, "cpu_features", lambda: features)
    assert loaded()._name == str(file)


# A process of its own: loading a broken file may end it.
BROKEN = """
import os, sys
from pathlib import Path
from cbatch.runtime.compiled import build

build.SOURCE = Path(sys.argv[1])
assert build.library.__wrapped__() is not None
(file,) = Path(sys.argv[2]).iterdir()
whole = file.read_bytes()
flipped = bytearray(whole)
flipped[len(whole) // 2] ^= 1
lengths = [*range(0, len(whole), 2999), 33, len(whole) - 32, len(whole) - 1]
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
    command = [sys.executable, "-c", BROKEN, str(build.SOURCE), str(cache)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    count = int(run.stdout.split()[1])
    lines = [
        line
        for line in run.stderr.splitlines()
        if "cannot be used (the file is incomplete)" in line
    ]
    assert count > 5 and len(lines) == count


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
    expected = "no cache folder" if trouble == "no home" else f"cannot be cached in {cache}"
    assert expected in caplog.text
    assert not cache.is_dir() or not [*cache.iterdir()]


# The interpreter itself may be in a home directory that is closed to others.
STRANGER = """
import os, sys
from pathlib import Path
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.system.cache import cached_result
from cbatch.runtime.compiled import build

build.SOURCE = Path(sys.argv[1])
os.setuid(12345)
made = CostProfile(base_s=1.0)
assert build.library.__wrapped__().lanes() == 7
assert cached_result("costs", {}, CostProfile, lambda: made) == made
"""


@needs_compiler
@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("home", [None, "/"])
def test_a_user_without_a_home(cache: Path, home: str | None) -> None:
    """The user is not in the password file, or has no home directory, or one that is not
    writable."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {} if home is None else {"HOME": home}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        source = shutil.copy(build.SOURCE, folder)
        command = [sys.executable, "-c", STRANGER, source]
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    kernels, costs = run.stderr.splitlines()
    assert "compil" in kernels and "costs" in costs


@pytest.mark.parametrize("trouble", ["no compiler", "fails", "nowhere"])
def test_without_a_compiler_there_is_no_kernel(
    trouble: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "no compiler":
        without_compilers(monkeypatch)
    else:
        monkeypatch.setattr(build, "find_compiler", lambda: Compiler(("cc",)))
    if trouble == "fails":

        def fails(*command: object, **_: object) -> None:
            raise subprocess.CalledProcessError(1, "cc", stderr=b"library.c:1:\nbad flag\n")

        monkeypatch.setattr(Compiler, "run", fails)
    if trouble == "nowhere":

        def nowhere(**_: object) -> None:
            raise FileNotFoundError("no usable temporary directory")

        monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
    assert build.library.__wrapped__() is None
    said = {"no compiler": "no C compiler", "fails": "bad flag", "nowhere": "no usable temporary"}
    assert "torch computes products" in caplog.text and said[trouble] in caplog.text


# ---- compilers -----------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_compiler
def test_cc_may_be_a_command_with_arguments(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = find_compiler()
    assert real is not None
    log = tmp_path / "with space" / "log"
    log.parent.mkdir()
    wrapper = script(tmp_path / "ccache", 'echo "$2" >> "$1"; shift; exec "$@"')
    monkeypatch.setenv("CC", f"{wrapper} '{log}' {real}")
    loaded()
    assert set(log.read_text().split()) == {real.command[0]} and not caplog.text


@needs_compiler
@pytest.mark.parametrize("cc", ["no-such-cc -m64", "gcc 'unended", " "])
def test_a_missing_cc_is_reported(
    cc: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    other = find_compiler()
    monkeypatch.setenv("CC", cc)
    assert find_compiler() == other
    messages = [f"CC: {cc!r} does not exist; compiling with {other}"] if cc.strip() else []
    assert caplog.messages == messages


@needs_compiler
def test_an_old_compiler_makes_what_it_knows(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so in one line, at the next start as well."""
    real, runnable = find_compiler(), builds.runnable()
    assert real is not None
    best, newest = runnable[0], real.flags(runnable[0])[-1]
    if best is runnable[-1]:
        pytest.skip("one build alone runs here")
    refuses = f'case " $* " in *" {newest} "*) echo "what is {newest}" >&2; exit 1;; esac'
    monkeypatch.setenv("CC", str(script(tmp_path / "old-cc", f'{refuses}\nexec {real} "$@"')))
    monkeypatch.delenv(builds.KERNELS, raising=False)
    expected = next(each for each in runnable if newest not in real.flags(each))
    for _ in range(2):
        caplog.clear()
        assert Path(loaded()._name).name.startswith(f"{expected.name}-")
        (message,) = caplog.messages
        assert f"old-cc does not support {best.name}: kernels are {expected.name}" in message
    monkeypatch.setenv(builds.KERNELS, best.name)
    assert build.library.__wrapped__() is None
    assert f"what is {newest}" in caplog.messages[-1]


@needs_compiler
def test_ziglang_is_used_without_another_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)
    assert find_compiler() is None
    monkeypatch.setattr(compiler, "has_ziglang", lambda: True)
    assert find_compiler() == Compiler((sys.executable, "-m", "ziglang", "cc"))
    monkeypatch.undo()
    assert find_compiler() != Compiler((sys.executable, "-m", "ziglang", "cc"))
