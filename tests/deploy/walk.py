"""Walk rendered objects as a cluster would, and say what it would refuse, kill, or never start.

Policies are evaluated by https://kubernetes.io/docs/concepts/services-networking/network-policies/.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from llmops.cli.service.sizing import is_hub_id
from llmops.units import parse_duration

NAMESPACE = "serving"
REFERENCE = re.compile(r"(?=[^/]*[.:])[\w.-]+(:\d+)?(/[a-z0-9._-]+)+(:[\w][\w.-]*)?@sha256:[0-9a-f]{64}")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class Pod:
    """A pod with its labels; with `ip` an address outside of the cluster."""

    labels: dict
    namespace: str = NAMESPACE
    of_namespace: dict = field(default_factory=dict)
    ip: str = ""

    @property
    def namespace_labels(self) -> dict:
        return {"kubernetes.io/metadata.name": self.namespace, **self.of_namespace}


@dataclass(frozen=True)
class Existing:
    """The objects in the namespace before the release: access modes by claim, keys by Secret."""

    claims: dict[str, list[str]]
    secrets: dict[str, set[str]]


@dataclass(frozen=True)
class Connection:
    """A connection that pods of `part` must be able to open."""

    part: str
    target: Pod
    port: int
    protocol: str = "TCP"
    what: str = ""


DNS = [
    Connection(part, target, port, protocol, what)
    for part in ("gateway", "control", "engine", "build")
    for target, port, what in (
        (Pod({"k8s-app": "kube-dns"}, "kube-system"), 53, "cluster DNS"),
        (Pod({}, ip="169.254.20.10"), 53, "NodeLocal DNSCache"),
        (Pod({"dns.operator.openshift.io/daemonset-dns": "default"}, "openshift-dns"), 5353, "OpenShift's DNS"),
    )
    for protocol in ("UDP", "TCP")
]


def matches(selector: dict, labels: dict) -> bool:
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def pods(objects: Iterable[dict]) -> Iterator[tuple[str, dict]]:
    """Yield the owner of each pod template, and the template."""
    for one in objects:
        spec, label = one.get("spec", {}), f"{one['kind']} {one['metadata']['name']}"
        if "template" in spec:
            yield label, spec["template"]
        for role in ("leaderTemplate", "workerTemplate"):
            if role in spec.get("leaderWorkerTemplate", {}):
                yield f"{label} {role}", spec["leaderWorkerTemplate"][role]


def containers(spec: dict) -> list[dict]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def allowed(policies: list[dict], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Return True if the policies let `source` connect to `target`."""

    def side(direction: str, pod: Pod, other: Pod, peers: str) -> bool:
        mine = [
            one["spec"] for one in policies
            if pod.namespace == NAMESPACE and not pod.ip and matches(one["spec"]["podSelector"], pod.labels)
            and direction.capitalize() in one["spec"]["policyTypes"]
        ]  # fmt: skip
        return not mine or any(
            _port(rule, port, protocol) and (not rule.get(peers) or any(_is(peer, other) for peer in rule[peers]))
            for spec in mine
            for rule in spec.get(direction) or ()
        )

    return side("egress", source, target, "to") and side("ingress", target, source, "from")


def _port(rule: dict, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    return not ports or any(one["port"] == port and one.get("protocol", "TCP") == protocol for one in ports)


def _is(peer: dict, pod: Pod) -> bool:
    if "ipBlock" in peer:
        return bool(pod.ip) and ipaddress.ip_address(pod.ip) in ipaddress.ip_network(peer["ipBlock"]["cidr"])
    if pod.ip:
        return False
    if "namespaceSelector" not in peer:
        return pod.namespace == NAMESPACE and matches(peer["podSelector"], pod.labels)
    inside = matches(peer["namespaceSelector"], pod.namespace_labels)
    return inside and matches(peer.get("podSelector", {}), pod.labels)


def faults(objects: list[dict], existing: Existing, connections: Iterable[Connection]) -> list[str]:
    """Return a sentence for each reason why this release would not run as its values say."""
    configs = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    names = [one["metadata"]["name"] for one in objects]
    found = [f"{name} is no name" for name in names if not DNS_LABEL.fullmatch(name)]
    for label, template in pods(objects):
        spec = template["spec"]
        found += [f"{label}: {fault}" for fault in _volumes(spec, existing, configs)]
        for container in containers(spec):
            place = f"{label}, {container['name']}"
            found += [f"{place}: {fault}" for fault in _container(container, spec, existing)]
        found += [f"{label}: {fault}" for fault in _starting(template, spec)]
    return [*found, *_rights(objects), *_policies(objects, connections)]


def _volumes(spec: dict, existing: Existing, configs: set[str]) -> Iterator[str]:
    for volume in spec.get("volumes", ()):
        claim, config = volume.get("persistentVolumeClaim"), volume.get("configMap")
        if claim and claim["claimName"] not in existing.claims:
            yield f"the claim {claim['claimName']!r} does not exist"
        elif claim and "ReadWriteMany" not in existing.claims[claim["claimName"]]:
            yield "several pods mount a claim that one node may have"
        if config and config["name"] not in configs:
            yield f"the ConfigMap {config['name']} is not made"
    mounted = {mount["name"] for container in containers(spec) for mount in container["volumeMounts"]}
    if mounted != {volume["name"] for volume in spec.get("volumes", ())}:
        yield "volumes and mounts are not the same"


def _container(container: dict, spec: dict, existing: Existing) -> Iterator[str]:
    if not REFERENCE.fullmatch(container["image"]):
        yield f"{container['image']} is no full reference with a digest"
    resources = container.get("resources", {})
    for name in ("cpu", "memory"):
        if not resources.get("requests", {}).get(name):
            yield f"no request for {name}"
    if not resources.get("limits", {}).get("memory"):
        yield "no limit of memory"
    variables = {one["name"]: one for one in container.get("env", ())}
    for variable in variables.values():
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        if secret and not secret.get("optional") and secret["key"] not in existing.secrets.get(secret["name"], ()):
            yield f"the Secret {secret['name']} has no key {secret['key']}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    claims = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume}
    for word in (part for one in container.get("args", ()) for part in one.split("=") if part.startswith("/")):
        if not any(word.startswith(f"{path}/") for path in mounts):
            yield f"{word} is on no volume"
    if container.get("args", [""])[0] == "build":
        yield from _build(container, variables, {path for path, name in mounts.items() if name in claims})


def _build(container: dict, variables: dict, claims: set[str]) -> Iterator[str]:
    checkpoint = container["args"][1]
    for name in ("HF_HOME", "LLMOPS_CACHE"):
        place = variables.get(name, {}).get("value", "")
        if not any(place.startswith(f"{path}/") for path in claims):
            yield f"{name} is not on the claim: checkpoints fill the node's disk"
    if not container["resources"]["requests"].get("ephemeral-storage"):
        yield "no request for disk"
    if is_hub_id(checkpoint):
        if "HF_TOKEN" not in variables:
            yield f"no token of the hub, which {checkpoint} may need"
        if "build@" not in container["image"]:
            yield f"{container['image']} has another ModelOpt than `llmops build` needs"
    if GPU not in container["resources"]["limits"]:
        yield "a build without GPUs"


def _starting(template: dict, spec: dict) -> Iterator[str]:
    gpus = [one for one in containers(spec) if int(one["resources"].get("limits", {}).get(GPU, 0)) > 0]
    if gpus and not any(one["key"] == GPU for one in spec.get("tolerations", ())):
        yield f"no toleration for {GPU}, with which nodes with GPUs are tainted"
    if template["metadata"]["labels"].get("llmops/role", "worker") == "worker":
        return
    (server,) = spec["containers"]
    if server not in gpus:
        yield "an engine without GPUs"
    commands = [one["command"] for one in spec.get("initContainers", ())]
    waits = [command[-1] for command in commands if "llmops.model_repository.wait" in command]
    probe = server["startupProbe"]
    longest = probe["periodSeconds"] * probe["failureThreshold"]
    if "args" not in server:
        if len(waits) != 1:
            yield "nothing waits for the repository"
        return
    _, repository, *flags = server["args"]
    if waits != [repository]:
        yield "nothing waits for the repository"
    if "--ready-timeout" not in flags:
        yield "the server gives up after its own 30 minutes, whatever the probe allows"
    elif not parse_duration(flags[flags.index("--ready-timeout") + 1]) < longest:
        yield f"the startup probe kills after {longest} s, while models may still load"


def _rights(objects: list[dict]) -> Iterator[str]:
    """A leader enters pods to start MPI there: those of its own group, and no gateway, which has the store's URL."""
    for role in (one for one in objects if one["kind"] == "Role"):
        workers = re.compile(re.escape(role["metadata"]["name"]) + r"-\d+-\d+")
        for rule in role["rules"]:
            names = rule.get("resourceNames", ())
            if not names or not all(workers.fullmatch(name) for name in names):
                yield f"the leaders of {role['metadata']['name']} may reach {rule['resources']} of every pod"


def _policies(objects: list[dict], connections: Iterable[Connection]) -> Iterator[str]:
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    parts: dict[str, list[Pod]] = {}
    for _, template in pods(objects):
        labels = template["metadata"]["labels"]
        parts.setdefault(labels["app.kubernetes.io/component"], []).append(Pod(labels))
    if policies and not any("ingress" not in one["spec"] and "egress" not in one["spec"] for one in policies):
        yield "no policy denies what the others do not name"
    for one in connections:
        for source in parts.get(one.part, ()):
            if not allowed(policies, source, one.target, one.port, one.protocol):
                yield f"{one.part} cannot reach {one.what or one.target} at port {one.port}/{one.protocol}"
                break
