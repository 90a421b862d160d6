"""Tests of the Compose file of a single machine.

The CLI must take its commands, the gateway its settings, and its files must exist.
"""

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
from llmops.model_repository.doctor.machine import EXTRAS
from tests.support.programs import write_program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
GATEWAY = (DEPLOY / COMPOSE["configs"]["gateway"]["file"]).read_text()
SERVICES = COMPOSE["services"]
OURS = ["triton", "gateway", "control"]


def parsed(command: list[str]) -> dict:
    """Return the parameters that our CLI reads from a container's command.

    A flag that the CLI does not have is an error.
    """
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
    assert gateway["replicas"] == ("triton:8001",)
    # control compares a new version with them
    assert SERVICES["control"]["environment"]["LLMOPS_REPLICAS"] == "triton:8001"
    assert {parsed(SERVICES[name]["command"])["grpc_port"] for name in ("triton", "triton-next")} == {8001}
    configured = yaml.safe_load(GATEWAY)
    assert configured["kafka"]["servers"] == SERVICES["control"]["environment"]["LLMOPS_KAFKA__SERVERS"]
    assert control["gateway"] == "http://gateway:9000"
    hosts = re.findall(r"(?:@|//|\b)(postgres|valkey|kafka|triton|gateway|control):\d+", yaml.safe_dump(COMPOSE))
    assert set(hosts) <= set(SERVICES)


def test_the_gateway_takes_its_settings(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text(GATEWAY)
    settings = load_settings(file)
    assert settings.slo.ttft_p95 == 0.5
    # what a container gets before it is killed is more than its streams get
    assert int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s")) > settings.timeouts.drain


def secrets_of(service: str) -> dict[str, str]:
    """The secrets of a service by the name of their file in the container."""
    given = SERVICES[service].get("secrets", ())
    return dict((one, one) if isinstance(one, str) else (one["target"], one["source"]) for one in given)


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_is_pinned_and_can_do_little(service):
    found = SERVICES[service]
    assert found["image"].rpartition(":")[2] not in ("", "latest")
    assert (found["cap_drop"], found["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert not {"privileged", "cap_add", "ipc", "pid", "network_mode"} & set(found)
    # PostgreSQL and Kafka write below their root
    assert found.get("read_only", False) is (service not in ("postgres", "kafka", "kafka-setup"))
    for port in found.get("ports", ()):
        # only the gateway is there for others
        assert service == "gateway" or port.startswith("127.0.0.1:")
    for mount in found.get("volumes", ()):
        source = mount.split(":")[0]
        if source.startswith("./"):
            assert (DEPLOY / source).exists()
        elif not source.startswith("${"):
            assert source in COMPOSE["volumes"]
    assert set(secrets_of(service).values()) <= set(COMPOSE["secrets"])
    # no password in a variable, where `docker inspect` shows it
    assert not [name for name in found.get("environment", {}) if re.search("PASSWORD$|KEYS?$|TOKEN$", name)]


def test_the_gateways_image_has_the_extras_of_its_settings():
    text = (DEPLOY.parent / "Dockerfile.gateway").read_text()
    installed = set(re.search(r"/src\[([\w,]+)\]", text)[1].split(","))
    wanted = {name for name, (_, use) in EXTRAS.items() if "the gateway's setting" in use}
    assert installed == {*wanted, "store"}


def test_programs_and_libraries_that_a_server_makes_can_run():
    """moby 28 `daemon/oci_linux.go` mounts a tmpfs with noexec, nosuid and nodev, unless its options say otherwise."""
    mounted = dict(one.partition(":")[::2] for one in SERVICES["triton"]["tmpfs"])
    for name in ("HOME", "LLMOPS_CACHE"):
        place = Path(SERVICES["triton"]["environment"][name])
        options = next(options for at, options in mounted.items() if place.is_relative_to(at))
        assert "exec" in options.split(",")


def test_postgres_is_healthy_only_once_others_can_connect():
    """docker-library/postgres 18 `docker-entrypoint.sh`, docker_temp_server_start: `-c listen_addresses=''`."""
    check = SERVICES["postgres"]["healthcheck"]["test"]
    assert check[check.index("-h") + 1] == "127.0.0.1"


def test_configs_and_secrets_of_read_only_containers_are_files():
    """pkg/compose/secrets.go of docker/compose v5.5.0 refuses others: "`file` is the sole supported option"."""
    for name, service in SERVICES.items():
        if service.get("read_only"):
            configs = [COMPOSE["configs"][one["source"]] for one in service.get("configs", ())]
            secrets = [COMPOSE["secrets"][one] for one in secrets_of(name).values()]
            assert all(set(one) == {"file"} for one in [*configs, *secrets])
            assert all((DEPLOY / one["file"]).is_file() for one in configs)


# who opens connections to whom; all others share no network
REACHED = {
    ("gateway", "triton"), ("gateway", "postgres"), ("gateway", "valkey"), ("gateway", "kafka"),
    ("control", "postgres"), ("control", "kafka"), ("control", "gateway"), ("kafka-setup", "kafka"),
    ("prometheus", "gateway"), ("prometheus", "control"), ("prometheus", "triton"), ("grafana", "prometheus"),
    # a new version, which control checks before it gets requests
    ("gateway", "triton-next"), ("control", "triton-next"), ("control", "triton"),
    ("prometheus", "triton-next"),
}  # fmt: skip
# neighbours without a connection between them: both are scraped, or both write to Kafka
NEIGHBOURS = {
    ("gateway", "kafka-setup"), ("control", "kafka-setup"), ("triton", "triton-next"),
}  # fmt: skip


def test_services_reach_only_whom_they_must():
    near = {
        tuple(sorted((one, other)))
        for one in SERVICES
        for other in SERVICES
        if one < other and set(SERVICES[one]["networks"]) & set(SERVICES[other]["networks"])
    }
    assert near == {tuple(sorted(pair)) for pair in REACHED | NEIGHBOURS}
    # the way out of the machine is where a port is published
    outside = {name for name, network in COMPOSE["networks"].items() if not network.get("internal")}
    for name, service in SERVICES.items():
        assert bool(set(service["networks"]) & outside) is bool(service.get("ports")), name


def test_a_service_has_its_own_passwords_only():
    assert {name: found for name in SERVICES if (found := set(secrets_of(name).values()))} == {
        "gateway": {"store", "redis", "kafka_gateway", "signing_key"},
        "control": {"store", "kafka_control", "signing_key"},
        "postgres": {"postgres"},
        "valkey": {"valkey"},
        "kafka": {"kafka"},
        "kafka-setup": {"kafka_admin"},
        "prometheus": {"metrics_key"},
        "grafana": {"grafana"},
    }


def test_kafka_lets_in_whom_it_knows_and_lets_each_do_its_part():
    kafka, setup = SERVICES["kafka"]["environment"], SERVICES["kafka-setup"]["command"][0]
    protocols = dict(one.split(":") for one in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert set(protocols.values()) == {"SASL_PLAINTEXT"}
    assert kafka["KAFKA_AUTHORIZER_CLASS_NAME"].endswith(".StandardAuthorizer")
    assert kafka["KAFKA_SUPER_USERS"] == "User:broker"
    assert "KAFKA_ALLOW_EVERYONE_IF_NO_ACL_FOUND" not in kafka
    rights = re.findall(r"--allow-principal User:(\w+) (.*?) --(topic|group) (\S+)", setup)
    found = {
        (user, kind, name): set(re.findall(r"--operation (\w+)", operations)) for user, operations, kind, name in rights
    }
    from llmops.control.ledger import CONSUMER_GROUP
    from llmops.gateway.settings import KafkaSettings

    topic = KafkaSettings(servers="kafka:9092").topic
    assert found == {
        ("gateway", "topic", topic): {"Write", "Describe"},
        ("control", "topic", topic): {"Read", "Describe"},
        ("control", "group", CONSUMER_GROUP): {"Read"},
    }
    assert f"--create --if-not-exists --topic {topic} " in setup
    subprocess.run(["sh", "-n"], input=setup.replace("$$", "$"), text=True, check=True)


DOCKER = """#!/bin/sh
echo "$@" >>FOLDER/calls
case "$1 $2" in
  "image inspect") echo "$5@sha256:0000" ;;
esac
"""


def started(folder: Path, repository: str = "/srv/r") -> Path:
    """deploy/ after start.sh; docker's place is taken by a program that notes its arguments."""
    deploy = folder / "deploy"
    if not deploy.exists():
        deploy.mkdir(parents=True)
        for name in ("start.sh", "compose.yaml"):
            shutil.copy(DEPLOY / name, deploy)
        write_program(folder / "bin" / "docker", DOCKER.replace("FOLDER", str(folder)))
    given = {"REPOSITORY": repository, "RUNBOOKS": "https://w.example/r"}
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **given}
    subprocess.run([deploy / "start.sh"], env=environment, check=True, capture_output=True)
    return deploy


def test_the_first_start_makes_every_password_and_the_second_none(tmp_path):
    deploy = started(tmp_path)
    secrets = deploy / "secrets"
    files = {path.name: path.read_text() for path in secrets.iterdir()}
    assert {Path(one["file"]).name for one in COMPOSE["secrets"].values()} <= set(files)
    assert secrets.stat().st_mode & 0o777 == 0o700
    # users of containers read them, in a folder that others cannot enter
    assert {path.stat().st_mode & 0o777 for path in secrets.iterdir()} == {0o644}
    names = ("postgres", "valkey_password", "kafka_broker", "kafka_gateway", "kafka_control", "grafana")
    own = [files[name] for name in names]
    assert len(set(own)) == len(own)
    assert all(re.fullmatch("[0-9a-f]{48}", one) for one in own)
    assert files["store"] == f"postgresql://llmops:{files['postgres']}@postgres/llmops"
    assert files["redis"] == f"redis://:{files['valkey_password']}@valkey:6379/0"
    for user in ("broker", "gateway", "control"):
        assert f'user_{user}="{files[f"kafka_{user}"]}"' in files["kafka.jaas"]
    settings = (deploy / ".env").read_text()
    assert "COMPOSE_FILE=compose.yaml:compose.digests.yaml\n" in settings
    # a disk that was full left an empty file, with which containers ran by tag instead of digest
    (deploy / ".env").write_text("")
    started(tmp_path)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == files
    assert (deploy / ".env").read_text() == settings


@pytest.mark.parametrize(
    "name", ["secrets/.postgres.part", "secrets/metrics_key", ".compose.digests.part", ".env.part"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_no_file_is_written_through_a_link(tmp_path, name, exists):
    """Before the fix, the password of PostgreSQL replaced the content of the file that a link named."""
    victim, deploy = tmp_path / "victim", started(tmp_path)
    for path in (deploy / "secrets", deploy / ".env", deploy / "compose.digests.yaml"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (deploy / "secrets").mkdir()
    if exists:
        victim.write_text("kept")
    (deploy / name).symlink_to(victim)
    if name == "secrets/metrics_key" and not exists:
        with pytest.raises(subprocess.CalledProcessError):
            started(tmp_path)
    else:
        started(tmp_path)
        assert "COMPOSE_FILE" in (deploy / ".env").read_text()
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "kept"
    assert not (deploy / "secrets" / "postgres").is_symlink()


@pytest.mark.parametrize("secret", ["\n", " ", 'a" user_mallory="x', "a\nmasterauth b", None])
def test_no_service_starts_with_a_password_that_is_none(tmp_path, secret):
    """Before the fix, a file with a line break gave Kafka's users empty passwords, and quotes another user."""
    secrets = started(tmp_path) / "secrets"
    for path in secrets.iterdir():
        if path.name != "metrics_key":
            path.unlink()
    if secret is None:
        (secrets / "kafka_gateway").mkdir()
    else:
        (secrets / "kafka_gateway").write_text(secret)
    with pytest.raises(subprocess.CalledProcessError):
        started(tmp_path)
    assert not (secrets / "kafka.jaas").exists()


@pytest.mark.parametrize(
    "repository", ["/srv/r\nPORT=0.0.0.0:1", "/srv/${HOME}", "/srv/'r", '/srv/"r', "/srv/`id`", "/r #"]
)
def test_the_folder_of_the_models_is_no_other_setting(tmp_path, repository):
    """Before the fix, a line break in its name wrote another variable of compose into .env."""
    with pytest.raises(subprocess.CalledProcessError):
        started(tmp_path, repository)
    assert not (tmp_path / "deploy" / ".env").exists()
    assert "REPOSITORY=/srv/my models\n" in (started(tmp_path, "/srv/my models") / ".env").read_text()


def entered(service: str, folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a command through a service's entrypoint, with its secrets in `folder`."""
    *shell, script, name = SERVICES[service]["entrypoint"]
    script = script.replace("$$", "$").replace("/run/secrets", str(folder))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, **environment}
    return subprocess.run([*shell, script, name, *command], env=given, capture_output=True, text=True)


@pytest.mark.parametrize("service", ["gateway", "control"])
def test_the_store_is_read_from_its_secret_by_whatever_command_is_run(service, tmp_path):
    """`docker compose run --rm control tenant list` is `llmops tenant list` on the service's store."""
    (tmp_path / "store").write_text(f"sqlite:///{tmp_path / 'own.db'}")
    done = entered(service, tmp_path, "tenant", "create", "acme")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own.db").is_file()


@pytest.mark.parametrize("service", ["gateway", "control"])
def test_passwords_reach_the_settings(service, tmp_path):
    secrets = started(tmp_path) / "secrets"
    there = tmp_path / "run"
    there.mkdir()
    for target, source in secrets_of(service).items():
        shutil.copy(secrets / Path(COMPOSE["secrets"][source]["file"]).name, there / target)
    config = tmp_path / "gateway.yaml"
    config.write_text(GATEWAY if service == "gateway" else "{}")
    binaries = write_program(tmp_path / "python" / "llmops", f'#!/bin/sh\nexec {sys.executable} -c "$1"\n').parent
    code = (
        "import json; from pathlib import Path; from llmops.gateway.settings import load_settings;"
        f"found = load_settings(Path('{config}')); print(json.dumps([found.store, found.redis, found.kafka.user,"
        "found.kafka.password, found.kafka.mechanism, found.kafka.servers]))"
    )
    given = SERVICES[service]["environment"]
    shell = {name: str(value).replace("/run/secrets", str(there)) for name, value in given.items()}
    done = entered(service, there, code, **shell, PATH=f"{binaries}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    store, redis, *kafka = json.loads(done.stdout)
    assert store == (secrets / "store").read_text()
    assert redis == ((secrets / "redis").read_text() if service == "gateway" else None)
    assert kafka == [service, (secrets / f"kafka_{service}").read_text(), "PLAIN", "kafka:9092"]


def test_prometheus_takes_its_configuration(promtool, tmp_path):
    text = (DEPLOY / "prometheus.yml").read_text().replace("/etc/prometheus/llmops", str(DEPLOY / "alerts"))
    (tmp_path / "key").write_text("k")
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/metrics_key", str(tmp_path / "key")))
    done = subprocess.run([*promtool, "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = (DEPLOY / "alerts" / "alerts.yaml").read_text().count("- alert:")
    assert f"{alerts} rules found" in done.stdout
    content = yaml.safe_load(text)
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in content["scrape_configs"]}
    ports = {"gateway": 9000, "control": 9100, "triton": 8002}
    # between roll-outs no alert may find the job of the new version, which is then away
    assert targets.pop("llmops-next") == ["triton-next:8002"]
    assert targets == {f"llmops-{name}": [f"{name}:{port}"] for name, port in ports.items()}
