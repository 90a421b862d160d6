"""The chart with the values that `llmops chart` writes for docs/kubernetes.md: would a cluster run it?

No API server takes part. Each mutation puts a fault back that the chart once had; helm or the walk must notice it.
"""

import copy
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from llmops.cli.main import cli
from llmops.errors import InputError
from tests.deploy import chart_values, walk
from tests.deploy.chart_values import DIGEST
from tests.deploy.test_chart import CHART, ROOT, chart_of, template
from tests.deploy.walk import DNS, Connection, Existing, Pod, faults
from tests.support.commands import llmops

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
IMAGES = [word for name, tag in (("gateway", "gateway"), ("engine", "trtllm"), ("build", "build"))
          for word in (f"--{name}-image", f"registry.example/llmops/{tag}{DIGEST}")]  # fmt: skip
OUTSIDE = Pod({}, ip="203.0.113.7")


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def existing() -> Existing:
    """Return the objects that the section "Before you install" has its reader make."""
    (claim,) = [one for one in map(yaml.safe_load, fenced(PAGE, "yaml")) if one.get("kind") == "PersistentVolumeClaim"]
    made = re.findall(r"kubectl create secret generic (\S+) (?:\\\n +)?--from-literal (\w+)=", PAGE)
    return Existing({claim["metadata"]["name"]: claim["spec"]["accessModes"]}, {name: {key} for name, key in made})


def connections() -> list[Connection]:
    """Return the connections of pods that the settings of the page's profile need."""

    def service(name: str, namespace: str) -> Pod:
        return Pod({"app": name}, namespace)

    postgres, valkey, kafka = service("pg", "databases"), service("valkey", "databases"), service("kafka", "streams")
    gateway, engine = Pod(labels("gateway")), Pod({**labels("engine"), "llmops/pool": "llama-70b"})
    return [
        *DNS,
        Connection("gateway", postgres, 5432, what="PostgreSQL"),
        Connection("control", postgres, 5432, what="PostgreSQL"),
        Connection("gateway", valkey, 6379, what="Valkey"),
        Connection("gateway", kafka, 9092, what="Kafka"),
        Connection("control", kafka, 9092, what="Kafka"),
        Connection("gateway", OUTSIDE, 443, what="the identity provider"),
        Connection("build", OUTSIDE, 443, what="the Hugging Face hub"),
        Connection("gateway", engine, 8001, what="engines"),
        Connection("control", gateway, 9000, what="gateways"),
    ]


def labels(part: str) -> dict:
    return {
        "app.kubernetes.io/name": "llmops", "app.kubernetes.io/instance": "llm", "app.kubernetes.io/component": part,
    }  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[dict, str]:
    """The values that `llmops chart` writes, and what it says is left to do."""
    (sample,) = [one for one in fenced((ROOT / "docs" / "operate.md").read_text(), "yaml") if "llama-70b:" in one]
    described = yaml.safe_load(sample)
    (profile,) = [one for one in map(yaml.safe_load, fenced(PAGE, "yaml")) if "profiles" in one]
    described["profiles"] |= profile["profiles"]
    done = chart_of(tmp_path_factory.mktemp("described"), described, "--profile", "cluster", *IMAGES)
    return yaml.safe_load(done.stdout), done.stderr


def walked(values: dict) -> list[str]:
    """Return the faults that helm or the walk finds."""
    try:
        objects = template(values, release="llm")
    except AssertionError as refused:
        return [" ".join(str(refused).split())]
    return faults(objects, existing(), connections())


def test_a_cluster_would_run_it(written):
    values, notes = written
    assert walked(values) == []
    assert "docs/kubernetes.md says: llmops-store (url); llmops-redis (url); " in notes
    assert "If a checkpoint is gated, create the Secret llmops-hub" in notes
    space = int(re.search(r"The claim needs about (\d+) GiB", notes)[1])
    # 141 GB of checkpoint, two copies of 71 GB in FP8 and what the gate records
    assert 260 < space < 300
    assert values["builds"]["llama-70b"]["gpus"] * 80e9 > 141e9 * 1.3 > values["engines"]["llama-70b"]["gpus"] * 80e9


def changed(*path: str, to: object = None) -> Callable[[dict], None]:
    """A change of the values; without `to` the key is removed."""

    def change(values: dict) -> None:
        *parents, last = path
        for name in parents:
            values = values.setdefault(name, {})
        if to is None:
            del values[last]
        else:
            values[last] = to

    return change


POOL, BUILD = ("engines", "llama-70b"), ("builds", "llama-70b")
# row, change of the values, what is said
VALUES = [
    (2, changed("network"), "network.backends.kafka names nothing"),
    (2, changed("network", "backends", "store"), "network.backends.store names nothing"),
    (2, changed("network", "backends", "oidc"), "network.backends.oidc names nothing"),
    (2, changed("network", "backends", "hub", to=[]), "network.backends.hub names nothing"),
    (2, changed("network", "backends", "redis", to=[{"ports": [{"port": 1}]}]), "gateway cannot reach Valkey"),
    (2, changed("network", "dns", to=[]), "network.dns is empty"),
    (3, changed(*BUILD, "token"), "no token of the hub"),
    (3, changed(*BUILD, "resources"), "builds.llama-70b needs resources.requests.cpu"),
    (22, changed("gateway", "autoscaling", "enabeld", to=True), "enabeld"),
    (22, changed("gateway", "settings", "slo", "ttft_p59", to="1s"), "ttft_p59"),
    (22, changed("gateway", "settings", "port", to=9001), "port"),
    (22, changed(*POOL, "gpus", to=0), "gpus"),
    (22, changed(*POOL, "replicas", to=-1), "replicas"),
    (22, changed("engines", "Big_Model", to={"repository": "/models/b"}), "Big_Model"),
    (22, changed("engines", "gateway", to={"repository": "/models/b"}), "gateway"),
    (22, changed("builds", "-x", to={"args": ["build"]}), "-x"),
    (22, changed("engines", "a" * 40 + "b", to={"repository": "/models/b"}), "a" * 40),
    (23, changed("image", "gateway", to="llmops:gateway"), "image.gateway is \"llmops:gateway\", which is not a full"),
    (23, changed("image", "engine", to="registry.example/llmops:1"), "image.engine"),
    (23, changed("image", "build"), "image.build"),
    (23, changed("image"), "image.gateway"),
    (23, changed("storage", "claim"), "storage.claim is empty"),
    (23, changed("storage", "claim", to="llmops-model"), "the claim 'llmops-model' does not exist"),
    (23, changed(*POOL, "resources"), "engines.llama-70b needs resources.requests.cpu"),
    (23, changed("secrets", "store", "name", to="store"), "the Secret store has no key url"),
    (23, changed(*POOL, "repository", to="/srv/r"), "pods see only files below storage.mountPath"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "change", "said"), VALUES)
def test_values_that_are_wrong_again_are_noticed(written, row, change, said):
    values = copy.deepcopy(written[0])
    change(values)
    found = walked(values)
    assert any(said in fault for fault in found), found


def notes_of(values: dict, folder: Path, text: str) -> str:
    """Render a text as NOTES.txt: `helm template` leaves notes out, and `helm install --dry-run` asks a cluster."""
    shutil.copytree(CHART, folder / "chart")
    kept = 'kind: ConfigMap\nmetadata: {name: notes}\ndata: {notes: {{ include "notes" . | quote }}}\n'
    place = folder / "chart" / "templates" / "notes.yaml"
    place.write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}{kept}')
    made = {one["metadata"]["name"]: one for one in template(values, chart=folder / "chart")}
    return made["notes"]["data"]["notes"]


@pytest.mark.parametrize("faulty", [False, True])
def test_the_commands_of_the_notes_work_in_their_order(written, tmp_path, monkeypatch, faulty):
    """Row 21: a key needs its tenant. The notes that are faulty again do not make it first."""
    text = (CHART / "templates" / "NOTES.txt").read_text()
    if faulty:
        text = re.sub(r".*tenant create.*\n", "", text)
    notes = notes_of(written[0], tmp_path, text)
    monkeypatch.setenv("LLMOPS_STORE", f"sqlite:///{tmp_path / 'store.db'}")
    commands = [shlex.split(one) for one in re.findall(r"kubectl .* -- llmops (.*)", notes)]
    names = {"TENANT": "acme", "EMAIL": "me@acme.example"}
    codes = [CliRunner().invoke(cli, [names.get(word, word) for word in one]).exit_code for one in commands]
    assert [one[:2] for one in commands][-1] == ["key", "create"]
    assert any(codes) is faulty


def test_the_waiting_container_says_what_it_waits_for(engine_dir, tmp_path):
    """Row 4: no repository, then an engine that is being built, then a complete one."""
    from llmops.model_repository.wait import missing_reason, wait_messages

    engine, repository = tmp_path / "engine", tmp_path / "repository"
    said = wait_messages(repository, interval=0.0)
    assert "there is no such folder" in next(said)
    shutil.copytree(engine_dir, engine)
    llmops("repo", f"m={engine}", "-o", repository)
    manifest = engine / "engine.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"complete": true', '"complete": false'))
    assert "is still being built" in next(said)
    manifest.unlink()
    assert missing_reason(repository)
    manifest.write_text(whole)
    assert list(said) == [f"{repository} is complete."]


def test_the_waiting_container_ends_on_sigterm(tmp_path):
    import sys

    command = [sys.executable, "-m", "llmops.model_repository.wait", str(tmp_path / "none")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Waiting for")
    process.terminate()
    assert process.wait(timeout=10) == 143


URL = "https://one.example/v1"
#: Settings with a secret in a URL, by the name that the refusal must have.
SECRETS: dict[str, dict] = {
    "traces.endpoint": {"traces": {"endpoint": "https://me:hunter2@traces.example/v1/traces"}},
    "oidc.jwks": {"oidc": {"issuer": URL, "audience": "a", "jwks": f"{URL}?apikey=hunter2"}},
    "safety.filters.a.url": {"safety": {"filters": {"a": {"kind": "http", "url": f"{URL}?k=hunter2"}}}},
    "safety.filters.words.url": {"safety": {"filters": {"words": {"kind": "http", "url": f"{URL}#hunter2"}}}},
    "web.prometheus": {"web": {"prometheus": "http://prometheus/?t=hunter2"}},
    "usage.engines.1": {"usage": {"engines": ["http://a:8002/metrics", "http://b:8002/metrics?x=hunter2"]}},
}


@pytest.mark.parametrize(
    ("models", "gateway", "said"),
    [
        ({"m": {}}, {"store": "sqlite:////srv/store.db"}, "gateway.store is a file or socket of one machine"),
        ({"m": {}}, {"redis": "unix:///run/valkey.sock"}, "gateway.redis is a file or socket of one machine"),
        ({"a.b": {}, "a-b": {}}, {}, "The models a-b and a.b would both be the pool a-b"),
        ({"llama 8b": {}}, {}, "The model llama 8b would be the pool 'llama 8b'"),
        ({"control": {}}, {}, "other than gateway, gateway-each, engines, control"),
        ({"a": {"build": {"target": "tensorrt", "tp": 8, "pp": 2}}, "a.0": {}}, {}, "the pools a and a-0 would have"),
        ({"m": {"build": {"target": "openvino"}}}, {}, "m has the build target openvino"),
        *(({"m": {}}, one, f"gateway.{name}: its URL has a user, a query or a") for name, one in SECRETS.items()),
        # before the fix they answered everyone, and billed no one
        ({"m": {}}, {"open": True, "store": "postgresql://db.example/llmops"}, "leave one of the two out"),
    ],
)
def test_addresses_and_models_that_a_cluster_cannot_have_are_refused(tmp_path, models, gateway, said):
    usual = {"checkpoint": "Qwen/Qwen3-8B", "build": {"target": "pytorch"}}
    described = {"models": {name: {**usual, **model} for name, model in models.items()}, "gateway": gateway}
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        chart_of(tmp_path, described, "-o", tmp_path / "values.yaml")
    assert "hunter2" not in str(refused.value)
    assert not (tmp_path / "values.yaml").exists()


def test_a_chart_has_the_texts_that_filters_look_for(tmp_path):
    """They may look like URLs with a secret, and none of them is an address."""
    texts = {"kind": "rules", "words": ["http://evil.example/?ref="], "patterns": [r"http://[^@]+@\w+"]}
    described = {
        "models": {"m": {"checkpoint": "Qwen/Qwen3-8B", "build": {"target": "pytorch"}}},
        "gateway": {
            "store": "postgresql://db.example/llmops",
            "safety": {"filters": {"a": texts}},
            "web": {"prometheus": "http://prometheus:9090/path"},
        },
    }
    values = yaml.safe_load(chart_of(tmp_path, described, *IMAGES).stdout)
    assert values["gateway"]["settings"]["safety"]["filters"]["a"] == texts
    settings = next(one for one in template(values, release="llm") if "gateway.yaml" in one.get("data", {}))
    assert texts["words"][0] in settings["data"]["gateway.yaml"]


def test_a_checkpoint_that_cannot_be_read_here_is_left_to_its_owner(tmp_path):
    result = chart_of(tmp_path, {"models": {"m": {"checkpoint": "/models/own", "build": {"target": "pytorch"}}}})
    values = yaml.safe_load(result.stdout)
    assert "resources" not in values["engines"]["m"]
    assert "token" not in values["builds"]["m"]
    assert "set resources of its pool and its build" in result.stderr


def test_gateways_get_the_keys_of_other_servers_and_reach_them(tmp_path):
    """Without the variable a gateway ends at once, and without a rule each prompt waits for its filter in vain."""
    vendor = {"kind": "http", "url": "https://moderations.example/v1/moderations", "key_env": "VENDOR_KEY"}
    gateway = {
        "store": "postgresql://pg.databases.svc/llmops", "safety": {"filters": {"vendor": vendor}},
        "providers": {"cloud": {"url": "https://10.1.2.3:8443/v1", "key_env": "CLOUD_KEY"}},
    }  # fmt: skip
    model = {"checkpoint": "Qwen/Qwen3-8B", "build": {"target": "pytorch"}}
    made = chart_of(tmp_path, {"models": {"m": model}, "gateway": gateway})
    assert "llmops-environment (CLOUD_KEY, VENDOR_KEY)." in made.stderr
    values = yaml.safe_load(made.stdout)
    objects = template({**values, "image": chart_values.IMAGES}, release="llm")
    found = [one for _, pod in walk.pods(objects) for one in pod["spec"]["containers"]]
    (container,) = [one for one in found if one["name"] == "gateway"]
    assert container["envFrom"] == [{"secretRef": {"name": "llmops-environment"}}]
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    for target, port in ((Pod({}, ip="198.51.100.7"), 443), (Pod({}, ip="10.1.2.3"), 8443)):
        assert walk.allowed(policies, Pod(labels("gateway")), target, port)


DATABASES = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "databases"}}}


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("pg.databases.svc.cluster.local", DATABASES),
        ("pg-0.pg.databases.svc", DATABASES),
        ("pg", {"podSelector": {}}),
        ("10.1.2.3", {"ipBlock": {"cidr": "10.1.2.3/32"}}),
        ("[2001:db8::7]", {"ipBlock": {"cidr": "2001:db8::7/128"}}),
        # policies know no names
        ("db.example.com", None),
        ("svc.example.com", None),
    ],
)
def test_addresses_become_rules(host, peer):
    from llmops.cli.service.sizing import egress_rules
    from llmops.gateway.settings import GatewaySettings

    found = egress_rules(GatewaySettings(store=f"postgresql://u:p@{host}:5433/llmops", redis=f"rediss://:p@{host}/0"))
    to = {} if peer is None else {"to": [peer]}
    assert found == {"store": [{**to, "ports": [{"port": 5433}]}], "redis": [{**to, "ports": [{"port": 6379}]}]}
