"""The files in `deploy` use options that the command line knows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from cbatch.cli.main import make_parser
from cbatch.cli.ray_serve import REFUSED_IN_FILE, build, require_fit
from cbatch.cli.serve import ENGINE_LOST, ServeSettings
from cbatch.cli.settings import read_settings, settings_of, unknown_variables
from cbatch.server.http.middleware import OPEN_PATHS

ROOT = Path(__file__).parent.parent
UNIT = (ROOT / "deploy" / "cbatch.service").read_text(encoding="utf-8")
IMAGE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
KUBERNETES = (ROOT / "deploy" / "kubernetes.yaml").read_text(encoding="utf-8")
RAY_SERVE = (ROOT / "deploy" / "ray_serve.yaml").read_text(encoding="utf-8")


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
    assert unit("Restart") == "on-failure" and ENGINE_LOST != 0, "a lost engine ends the server"


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


def test_the_image_holds_every_package_that_is_shipped_and_nothing_that_is_not_there() -> None:
    copied = {path for line in re.findall(r"^COPY (.*) \S+$", IMAGE, re.M) for path in line.split()}
    assert all((ROOT / path).exists() for path in copied)
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "tools"}
    assert packages <= copied


def test_kubernetes_asks_the_servers_own_probes_and_gives_it_its_grace() -> None:
    deployment, service = yaml.safe_load_all(KUBERNETES)
    template = deployment["spec"]["template"]
    pod = template["spec"]
    (container,) = pod["containers"]
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    paths = [probe["httpGet"]["path"] for probe in probes]
    assert paths == ["/ready", "/ready", "/health"] and set(paths) < set(OPEN_PATHS)
    (port,) = container["ports"]
    assert {probe["httpGet"]["port"] for probe in probes} == {port["name"]}
    (served,) = service["spec"]["ports"]
    assert served["targetPort"] == port["name"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]

    variables = {each["name"]: each["value"] for each in container["env"]}
    assert unknown_variables(variables, ServeSettings) == []
    args = make_parser().parse_args(["serve", *container["args"]])
    settings = read_settings(ServeSettings, args, variables).values
    assert (settings.host, settings.port) == ("0.0.0.0", port["containerPort"])
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= settings.grace + pause_s + 10
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert settings.model == mounts["model"]
    assert str(settings.api_key_file).startswith(mounts["keys"])
    memory_gib = int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert settings.engine.kv_cache_memory_bytes < memory_gib * 2**30


def test_the_config_file_of_ray_serve_has_options_of_ours() -> None:
    (application,) = yaml.safe_load(RAY_SERVE)["applications"]
    module, _, function = application["import_path"].partition(":")
    assert (module, function) == (build.__module__, build.__name__)
    settings = settings_of(ServeSettings, application["args"], "args")
    require_fit(settings, REFUSED_IN_FILE)
    assert settings.values.max_replicas == 4 and settings.values.model == "/model"


def test_ray_serve_takes_its_config_file() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs Ray Serve: 'cbatch[ray]'")
    taken = schema.ServeDeploySchema(**yaml.safe_load(RAY_SERVE))
    assert taken.http_options.port == 8000
