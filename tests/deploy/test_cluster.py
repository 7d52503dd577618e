"""Checks the files that start fronts and engines, as text: no container engine and no cluster runs here."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stillroom.cli.main import build_app
from stillroom.config.engine_address import parse_engine_address
from stillroom.config.load import load_config, settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.cluster.yaml"
MANIFESTS = DEPLOY / "kubernetes" / "stillroom.yaml"
RAY = DEPLOY / "kubernetes" / "rayservice.yaml"

Json = dict[str, Any]


def services() -> dict[str, Json]:
    found: dict[str, Json] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def resources(path: Path, kind: str) -> dict[str, Json]:
    return {one["metadata"]["name"]: one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == kind}


def pod(name: str) -> Json:
    found: Json = resources(MANIFESTS, "Deployment")[name]["spec"]["template"]["spec"]
    return found


def worker() -> Json:
    (group,) = resources(RAY, "RayService")["stillroom"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found: Json = group["template"]["spec"]
    return found


def own_commands() -> Iterator[list[str]]:
    yield services()["front"]["command"]
    yield services()["engine"]["command"]
    for name in ("stillroom-front", "stillroom-engine"):
        yield pod(name)["containers"][0]["args"]


def environment_of(container: Json) -> dict[str, str]:
    return {one["name"]: one.get("value", "from-a-secret") for one in container["env"]}


def test_compose_file_follows_its_specification() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("command", list(own_commands()), ids=" ".join)
def test_commands_have_these_flags(command: list[str]) -> None:
    import typer

    name, *arguments = command
    parser = typer.main.get_command(build_app(name)).commands[name]  # type: ignore[attr-defined]
    parser.make_context(name, list(arguments))  # raises for an unknown flag or a wrong value


def test_settings_in_the_files_exist() -> None:
    known = {one.env_name for one in settings().values()} | {"STILLROOM_KB"}
    texts = [path.read_text() for path in (COMPOSE, MANIFESTS, RAY)]
    named = {name for text in texts for name in re.findall(r"\bSTILLROOM_[A-Z]+__[A-Z_]+|\bSTILLROOM_KB\b", text)}
    assert named and named <= known
    for name in ("stillroom-front", "stillroom-engine"):
        load_config(env=environment_of(pod(name)["containers"][0]))


def test_only_the_front_is_published_and_on_this_machine_only() -> None:
    found = services()
    assert found["front"].pop("ports") == ["127.0.0.1:8321:8321"]
    for name, service in found.items():
        assert "ports" not in service and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["networks"] == (["engines", "outside"] if name == "front" else ["engines"]), name
        assert re.fullmatch(r"stillroom:cluster|[\w./-]+:v?\d+\.\d+(\.\d+)?", service["image"]), name
    assert yaml.safe_load(COMPOSE.read_text())["networks"]["engines"] == {"internal": True}


def test_secrets_stand_in_no_file() -> None:
    for value in re.findall(r"(?:SECRET|PASSWORD): (.+)", COMPOSE.read_text()):
        assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value)
    for container in (pod("stillroom-front")["containers"][0], pod("stillroom-engine")["containers"][0], ray()):
        for one in container["env"]:
            is_secret = one["name"] in ("STILLROOM_CLUSTER__SECRET", "STILLROOM_KB", "PGPASSWORD")
            assert ("secretKeyRef" in one.get("valueFrom", {})) == is_secret


def ray() -> Json:
    found: Json = worker()["containers"][0]
    return found


def test_front_looks_for_engines_where_they_are() -> None:
    (address,) = (one for one in services()["front"]["command"] if one.startswith("dns://"))
    found = parse_engine_address("--engines", address)
    assert found.host in services() and str(found.port) in services()[found.host]["command"]

    (address,) = re.findall(r"--engines=(\S+)", " ".join(pod("stillroom-front")["containers"][0]["args"]))
    found = parse_engine_address("--engines", address)
    service = resources(MANIFESTS, "Service")[found.host]["spec"]
    assert service["clusterIP"] == "None" and service["ports"][0]["port"] == found.port


def test_selectors_name_pods_and_ports_that_exist() -> None:
    deployments = resources(MANIFESTS, "Deployment").values()
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in deployments]
    for one in deployments:
        assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    for service in resources(MANIFESTS, "Service").values():
        assert service["spec"]["selector"] in labels
    budget = resources(MANIFESTS, "PodDisruptionBudget")["stillroom-engine"]["spec"]
    policy = resources(MANIFESTS, "NetworkPolicy")["stillroom-engine"]["spec"]
    assert budget["selector"]["matchLabels"] == policy["podSelector"]["matchLabels"] == {"app": "stillroom-engine"}
    assert [one["podSelector"]["matchLabels"] for one in policy["ingress"][0]["from"]] == [{"app": "stillroom-front"}]
    for name in ("stillroom-front", "stillroom-engine"):
        (container,) = pod(name)["containers"]
        (port,) = container["ports"]
        assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port["name"]}


@pytest.mark.parametrize("kind", ["stillroom-front", "stillroom-engine", "ray"])
def test_pods_are_confined_and_may_end_their_answers(kind: str) -> None:
    spec = worker() if kind == "ray" else pod(kind)
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    grace = float(environment_of(spec["containers"][0])["STILLROOM_SERVER__GRACE_S"])
    assert spec["terminationGracePeriodSeconds"] > grace + 15
    mounted = {one["name"] for container in spec["containers"] for one in container["volumeMounts"]}
    assert mounted <= {one["name"] for one in spec["volumes"]}


def test_ray_runs_the_application_with_arguments_that_it_takes() -> None:
    from stillroom.supervision.served_process import Options

    spec = resources(RAY, "RayService")["stillroom"]["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"def {function}(options: Options)" in source
    options = Options(**application["args"])
    assert options.engines == spec["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"]
    assert options.cpus == float(ray()["resources"]["limits"]["cpu"])
    pinned = re.search(r"ray\[serve\]==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned is not None and spec["rayClusterConfig"]["rayVersion"] == pinned[1]
