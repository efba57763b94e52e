"""The unit and the container file say what the command line understands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cbatch.cli.main import make_parser
from cbatch.cli.serve import LOST, ServeSettings
from cbatch.cli.settings import read_settings, unknown_variables

ROOT = Path(__file__).parent.parent
UNIT = (ROOT / "deploy" / "cbatch.service").read_text(encoding="utf-8")
IMAGE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")


def unit(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, flags=re.MULTILINE)
    return str(value)


def test_the_units_command_is_one_that_is_understood() -> None:
    program, *words = shlex.split(unit("ExecStart"))
    assert program.endswith("/cbatch")
    args = make_parser().parse_args(words)
    settings = read_settings(ServeSettings, args).values
    assert settings.log_format == "json"
    assert settings.grace < int(unit("TimeoutStopSec")), "systemd would cut the grace time short"
    assert unit("Restart") == "on-failure" and LOST != 0, "a lost engine would be the end of it"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    here = tmp_path / "cbatch.service"
    for text, fine in ((UNIT, True), (UNIT.replace("KillMode=mixed", "KillMode=gently"), False)):
        here.write_text(text.replace("/opt/cbatch/bin/cbatch", sys.executable))
        done = subprocess.run(
            ["systemd-analyze", "verify", here],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"SYSTEMD_LOG_LEVEL": "warning"},
        )
        said = [line for line in done.stderr.splitlines() if "cbatch.service" in line]
        assert (not said) == fine, done.stderr


def test_the_images_command_and_variables_are_understood() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", IMAGE, flags=re.MULTILINE)
    program, *words = json.loads(entry)
    assert program == "cbatch"
    (line,) = re.findall(r"^ENV (.*)$", IMAGE, flags=re.MULTILINE)
    variables = dict(word.split("=", 1) for word in line.split())
    assert unknown_variables(variables, ServeSettings) == []
    assert unknown_variables({"CBATCH_HOSTS": ""}, ServeSettings) == ["CBATCH_HOSTS"]
    settings = read_settings(ServeSettings, make_parser().parse_args(words), variables).values
    assert settings.host == "0.0.0.0", "nothing outside the container could reach it"
    assert f"EXPOSE {settings.port}" in IMAGE


def test_the_image_holds_every_package_and_nothing_that_is_not_there() -> None:
    copied = {path for line in re.findall(r"^COPY (.*) \S+$", IMAGE, re.M) for path in line.split()}
    assert all((ROOT / path).exists() for path in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= copied
