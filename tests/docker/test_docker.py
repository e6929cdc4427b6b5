"""The container files: pinned bases, no secret in a layer, a dashboard of metrics that the server really has."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.measure.emulator.metrics import ServerMetrics
from harness.model.engine import EngineConfig
from harness.model.spec import ServerSpec, load_toml
from harness.redact import is_secret
from harness.stacks.rbln.launch import requirements
from harness.stacks.rbln.launch.serving import visible_devices
from tests.support.checkout import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = (DOCKER / "Dockerfile", DOCKER / "rbln.Dockerfile")
PINNED = re.compile(r"(@sha256:[0-9a-f]{64}|:v?\d+\.\d+\.\d+(-[a-z0-9.-]+)?)$")
SERVICE_KEYS = {
    *("image", "build", "devices", "shm_size", "ulimits", "entrypoint", "command", "environment", "volumes", "ports"),
    *("stop_grace_period", "healthcheck", "profiles", "depends_on", "extra_hosts", "user", "secrets"),
}


def _instructions(path: Path) -> list[str]:
    """Logical lines, comments and continuation marks gone."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    return [line for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines() if line.strip()]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    table: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    return table


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_base_image_has_an_exact_tag(path: Path) -> None:
    bases = [line.split()[1] for line in _instructions(path) if line.startswith("FROM")]
    assert bases
    assert all(PINNED.search(base) for base in bases), bases
    assert re.match(r"# syntax=docker/dockerfile:\d+\.\d+\.\d+\n", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_let_in_by_the_ignore_file(path: Path) -> None:
    let_in = {line[1:] for line in (DOCKER / f"{path.name}.dockerignore").read_text().splitlines() if line[:1] == "!"}
    for line in _instructions(path):
        if line.startswith("COPY") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source.removeprefix("./")).exists(), source
                assert source.removeprefix("./") in let_in, source


def test_everything_the_package_is_built_from_is_copied() -> None:
    project = load_toml(ROOT / "pyproject.toml")
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        for source in {name.split("/")[0] for name in included}:
            assert f"COPY {source} ./{source}" in text, (path.name, source)


def test_the_indexes_are_mounted_for_one_command_and_kept_nowhere() -> None:
    lines = _instructions(DOCKER / "rbln.Dockerfile")
    (install,) = [line for line in lines if "index_url" in line]
    for index in requirements.INDEXES:
        assert f"--mount=type=secret,id={index.secret},required=true" in install
    assert not any(re.match(r"(ARG|ENV|COPY)\b.*(secret|token|password|netrc|index)", line, re.I) for line in lines)
    assert any("PIP_NO_CACHE_DIR=1" in line for line in lines)
    assert "secrets/" in (DOCKER / ".gitignore").read_text()


def test_the_image_installs_what_the_table_of_requirements_says() -> None:
    lines = _instructions(DOCKER / "rbln.Dockerfile")
    (install,) = [line for line in lines if "index_url" in line]
    assert re.findall(r'"([\w-]+)([=<>][^"]*)"', install) == [*requirements.INSTALLED.items()]
    assert {line.split()[1] for line in lines if line.startswith("FROM")} == {requirements.BASE_IMAGE}


def test_the_server_and_its_secrets_are_those_of_the_table(compose: dict[str, Any]) -> None:
    services, secrets = compose["services"], {index.secret for index in requirements.INDEXES}
    assert compose["secrets"].keys() == secrets | {"grafana_password"}
    for name in ("server", "measure"):
        assert services[name]["image"] == f"rbln-stack:{requirements.RELEASE}"
        assert set(services[name]["build"]["secrets"]) == secrets
    devices = visible_devices(requirements.RELEASE, range(4))
    assert devices.items() <= services["server"]["environment"].items()


def test_several_artifacts_lie_where_the_host_has_them_and_nothing_becomes_a_folder(compose: dict[str, Any]) -> None:
    for name in ("server", "measure"):
        mounts = [volume for volume in compose["services"][name]["volumes"] if isinstance(volume, dict)]
        assert all(mount["bind"] == {"create_host_path": False} for mount in mounts)
        (artifacts,) = [mount for mount in mounts if "ARTIFACTS" in mount["source"]]
        assert artifacts["source"] == artifacts["target"]
    short = [str(one) for one in compose["services"]["measure"]["volumes"] if isinstance(one, str)]
    assert not any("rbln-smi" in volume for volume in short)


def test_no_address_of_a_private_index_is_in_any_file() -> None:
    for path in sorted(DOCKER.rglob("*")):
        if path.is_file():
            hosts = set(re.findall(r"https?://([^/\s\"':]+)", path.read_text(encoding="utf-8")))
            assert hosts <= {"127.0.0.1", "prometheus", "server"}, (path.name, hosts)


def _tool(name: str) -> str | None:
    """A command of the development environment, or on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def test_the_linter_finds_nothing() -> None:
    linter = _tool("hadolint")
    if linter is None:
        pytest.skip("no hadolint here (make setup installs it)")
    # It looks for settings in a home folder, and fails where there is none.
    settings = {**os.environ, "HOME": str(DOCKERFILES[0].parent)}
    done = subprocess.run([linter, *map(str, DOCKERFILES)], env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert not done.stdout


def test_the_compose_file_is_one_by_the_specification() -> None:
    """Held to the schema of the compose specification, which the checker brings along."""
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("no check-jsonschema here (make setup installs it)")
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*words, str(DOCKER / "compose.yaml")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_pinned_and_listens_on_this_host_only(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {"server", "measure", "harness", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert service.keys() <= SERVICE_KEYS, (name, service.keys() - SERVICE_KEYS)
        assert PINNED.search(service["image"]), service["image"]
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert not service.get("privileged")


def test_what_a_service_mounts_or_builds_from_is_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve().is_file()
            assert set(service["build"].get("secrets", [])) <= set(compose["secrets"])
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        for source in (volume.split(":")[0] for volume in service.get("volumes", []) if isinstance(volume, str)):
            if source.startswith("./"):
                assert (DOCKER / source).exists(), source
            elif re.match(r"^[a-z]", source):
                assert source in compose["volumes"], source


def test_no_password_stands_in_the_file(compose: dict[str, Any]) -> None:
    secrets = [
        (name, value)
        for service in compose["services"].values()
        for name, value in service.get("environment", {}).items()
        if is_secret(name)
    ]
    assert all(value.startswith("/run/secrets/") for _, value in secrets), secrets
    assert all(list(secret) in (["file"], ["environment"]) for secret in compose["secrets"].values())


def test_a_service_asks_only_for_what_it_uses(compose: dict[str, Any]) -> None:
    """A variable that must be set would be wanted whichever service is started."""
    assert "?" not in "".join(re.findall(r"\$\{[^}]*\}", (DOCKER / "compose.yaml").read_text(encoding="utf-8")))
    wants = {name: str(service) for name, service in compose["services"].items()}
    assert [name for name, text in wants.items() if "ARTIFACT" in text] == ["server", "measure"]
    assert [name for name, text in wants.items() if "grafana_password" in text] == ["grafana"]
    assert compose["secrets"]["grafana_password"] == {"environment": "GRAFANA_PASSWORD"}


@pytest.mark.parametrize("name", ["harness", "measure"])
def test_results_lie_in_runs_and_belong_to_who_started_it(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert "../runs:/work/runs" in service["volumes"], "the harness writes to runs/ in /work"
    assert not any(str(volume).endswith(":/work") for volume in service["volumes"])
    assert service["user"].startswith("${HARNESS_USER:-")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_any_user_may_run_the_image(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "RUN mkdir --mode=1777 /work /cache" in text
    assert "HOME=/cache XDG_CACHE_HOME=/cache" in text


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_no_layer_keeps_a_credential(path: Path) -> None:
    for line in _instructions(path):
        word, _, rest = line.partition(" ")
        if word in ("ARG", "ENV"):
            assert not any(is_secret(one.split("=")[0]) for one in rest.split()), line
        if word == "COPY" and "--from" not in line:
            assert not re.search(r"secret|netrc|\.pypirc|pip\.conf|\s\.\s", rest), line
        # A mounted secret may be read by one command; nothing may write it anywhere.
        assert not re.search(r"/run/secrets/\w+\s*(>|\|)|(cp|mv|install|tee)\s+\S*(secrets|netrc)", rest), line
        assert "--build-arg" not in line


def test_the_server_is_started_with_what_the_harness_reads(compose: dict[str, Any]) -> None:
    command = compose["services"]["server"]["command"]
    assert {"--enable-prompt-tokens-details", "--shutdown-timeout=30"} <= set(command)
    assert compose["services"]["server"]["stop_grace_period"] == "45s", "longer than the shutdown timeout"


EXPORTER_MEMBERS = {"TEMPERATURE", "CARD_POWER", "DRAM_USED", "DRAM_TOTAL", "UTILIZATION", "HEALTH"}
"""Of the gauge family RBLN_DEVICE_STATUS (the vendor's public documentation)."""


def _panels() -> list[dict[str, Any]]:
    board = json.loads((DOCKER / "grafana" / "dashboards" / "run.json").read_text(encoding="utf-8"))
    panels: list[dict[str, Any]] = board["panels"]
    return panels


def test_every_panel_asks_for_metrics_that_the_server_or_the_exporter_has() -> None:
    config = EngineConfig.from_server(ServerSpec())
    body = ServerMetrics("model", config, num_gpu_blocks=513).render().decode()
    samples = [sample for family in text_string_to_metric_families(body) for sample in family.samples]
    served = {sample.name for sample in samples}
    labels = {(sample.name, key, value) for sample in samples for key, value in sample.labels.items()}
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels) >= 8
    for panel in panels:
        assert panel["datasource"]["uid"] == "prometheus"
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked = re.findall(r"vllm:\w+", target["expr"])
            members = re.findall(r"RBLN_DEVICE_STATUS:(\w+)", target["expr"])
            assert asked or members, target["expr"]
            assert set(asked) <= served, set(asked) - served
            assert set(members) <= EXPORTER_MEMBERS, target["expr"]
            for name, key, value in re.findall(r'(vllm:\w+)\{(\w+)="([^"]*)"\}', target["expr"]):
                assert (name, key, value) in labels, target["expr"]


def test_prometheus_asks_the_server_and_the_exporter_where_they_are(compose: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert config.keys() == {"global", "scrape_configs"}
    assert re.fullmatch(r"\d+s", config["global"]["scrape_interval"])
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == {"vllm", "rbln-devices"}
    for job in jobs.values():
        assert job.keys() <= {"job_name", "static_configs", "metrics_path", "scrape_interval"}
        (group,) = job["static_configs"]
        assert all(re.fullmatch(r"[\w.-]+:\d+", target) for target in group["targets"])
    (server,) = jobs["vllm"]["static_configs"][0]["targets"]
    assert server == "server:8000"
    assert "--port=8000" in compose["services"]["server"]["command"]
    (exporter,) = jobs["rbln-devices"]["static_configs"][0]["targets"]
    assert f"{exporter.split(':')[0]}:host-gateway" in compose["services"]["prometheus"]["extra_hosts"]
    mounted = [volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"]]
    (path,) = [word.split("=")[1] for word in compose["services"]["prometheus"]["command"] if "config.file" in word]
    assert path in mounted


def test_the_dashboard_is_provisioned_where_it_is_mounted(compose: dict[str, Any]) -> None:
    yaml = pytest.importorskip("yaml")
    provisioning = DOCKER / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "harness.yml").read_text())["providers"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounts
    assert source["uid"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
