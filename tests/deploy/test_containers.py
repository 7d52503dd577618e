"""Checks the Dockerfile and the compose file as text, without running them."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from stillroom.config.load import load_config
from stillroom.errors import ConfigError
from stillroom.rag.stillroom import Stillroom
from stillroom.server.auth.guard import check_access, own_names

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def instructions(stage: int = -1) -> list[tuple[str, str]]:
    """Return the instructions of a stage of the image, by default the last."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    stages: list[list[tuple[str, str]]] = []
    for name, _, rest in lines:
        if name == "FROM":
            stages.append([])
        stages[-1].append((name, rest.strip()))
    return stages[stage]


def test_compose_file_follows_its_specification() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_composed_services_are_reachable_from_this_machine_only() -> None:
    for name, service in compose()["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged") and service.get("network_mode") != "host", name


def test_images_are_pinned_and_mounted_files_exist() -> None:
    services = compose()["services"]
    for service in services.values():
        assert re.fullmatch(r"stillroom:local|[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose()["volumes"]
    assert (DEPLOY / services["stillroom"]["build"]["context"] / "Dockerfile").is_file()


def test_prometheus_and_grafana_name_existing_services() -> None:
    services = compose()["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in services and services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in scraped["rule_files"])
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090" and "prometheus" in services
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/stillroom.yml").read_text())["providers"][0]
    mounts = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts


def test_image_runs_unprivileged_with_a_health_check() -> None:
    final = instructions()
    names = [name for name, _ in final]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert dict(final)["USER"] not in ("root", "0")
    check = json.loads(dict(final)["HEALTHCHECK"].partition("CMD ")[2])
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert "/healthz" in check[2]
    assert not any(name == "ADD" for name, _ in [*instructions(0), *final])
    assert not any(word in rest for _, rest in final for word in ("safetensors", "COPY src", "pip install"))


def image_environment() -> dict[str, str]:
    pairs = (word.split("=", 1) for name, rest in instructions() if name == "ENV" for word in shlex.split(rest))
    return {key: value for key, value in pairs if key.startswith("STILLROOM_")}


def test_image_alone_refuses_to_start_without_keys() -> None:
    config = load_config(env=image_environment())

    assert config.server.host == "0.0.0.0"
    with pytest.raises(ConfigError, match="no key would be asked for"):
        check_access(config.server)


def test_compose_configuration_starts_without_keys() -> None:
    own = compose()["services"]["stillroom"]["environment"]
    given = {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value) for key, value in own.items()}
    config = load_config(env=image_environment() | given)

    assert config.runtime.model == "bundled"
    assert check_access(config.server).keys is None
    names = own_names(config.server.host, config.server.allowed_hosts)
    assert names is not None and {"localhost", "127.0.0.1", "stillroom"} <= names  # nor pages of other names


def test_files_copied_into_the_image_are_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [rest.split()[:-1] for name, rest in instructions(0) if name == "COPY"]
    for source in (one for sources in copied for one in sources):
        assert source.removeprefix("./") in kept and (ROOT / source).exists()


def test_image_installs_torch_in_the_allowed_range() -> None:
    allowed = re.search(r'"(torch[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert allowed is not None
    assert any(f"'{allowed[1]}'" in rest for name, rest in instructions(0) if name == "RUN")


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint, which is not a dependency")
def test_hadolint_has_no_complaint() -> None:
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_backup_of_the_operations_page_works_repeatedly(tmp_path: Path) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    script = re.search(r"exec -T stillroom sh -e <<'EOF'\n(.*?)EOF\n", page, re.DOTALL)
    assert script is not None
    data, backup, python = tmp_path / "data", tmp_path / "data/backup", shlex.quote(sys.executable)
    command = script[1].replace("/data/", f"{data}/").replace("python ", f"{python} ")
    for night in ("first", "second"):
        with Stillroom.open(data / "kb") as stillroom:
            (tmp_path / f"{night}.md").write_text(f"the {night} document")
            stillroom.add(tmp_path / f"{night}.md")
            subprocess.run(["sh", "-e"], input=command, text=True, check=True)  # while it is open
    assert sorted(path.name for path in backup.iterdir()) == ["corpus.sqlite3", "manifest.json"]
    with Stillroom.open(backup) as restored:
        assert restored.num_documents == 2
