"""Sizes of engines and builds in a cluster, and addresses of backends."""

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmops.build.checkpoint.hub_download import HUB_ID
from llmops.build.spec import BuildSpec
from llmops.errors import CheckpointError, InputError, ResourceError
from llmops.gateway.settings import GatewaySettings, HttpFilterSettings, ProviderSettings

_GIB = 2**30
#: CPU cores that an engine pod requests for its server.
_CORES = 2
#: CPU cores that an engine pod requests for the process of each GPU.
_CORES_PER_GPU = 2
#: GiB of host memory in addition to weights: processes, pinned buffers, and 16 GiB of /dev/shm.
_FIXED_GIB = 24
#: Memory limit of a container as a multiple of its request. Weights pass through the page cache
#: while they are read, so a container needs more than the request.
_LIMIT = 2
#: Default ports of backends, for URLs without a port.
_PORTS = {"postgresql": 5432, "redis": 6379, "rediss": 6379, "http": 80, "https": 443}


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model in bytes.

    Attributes:
        checkpoint: The download.
        disk: The files that the build writes.
        weights: The weights that are served.
        build_ram: The memory of the largest stage of the build.
        build_gpu: The GPU memory of the largest stage of the build.
    """

    checkpoint: int
    disk: int
    weights: int
    build_ram: int
    build_gpu: int


def estimate_sizes(spec: BuildSpec) -> ModelSizes | None:
    """Return the sizes of one model, or None if its config.json cannot be read on this machine.

    Raises:
        InputError: `llmops build` would reject this model.
    """
    from llmops.build.job.dry_run import prepare_dry_run
    from llmops.build.targets.nvidia.nvidia_job import NvidiaJob
    from llmops.build.targets.nvidia.stage_estimates import stage_needs, stored_bytes

    try:
        job = prepare_dry_run(replace(spec, output=Path("engine")))
    except (CheckpointError, ResourceError):
        return None
    if not isinstance(job, NvidiaJob):
        return None
    weights = stored_bytes(job.request)
    stages = [stage for stage in stage_needs(job.request, gpu=True) if stage.minutes is not None]
    return ModelSizes(
        checkpoint=job.checkpoint.weight_bytes,
        disk=job.disk_bytes,
        weights=weights,
        build_ram=max((stage.ram for stage in stages), default=0),
        build_gpu=max((stage.gpu for stage in stages), default=0),
    )


def resources(ram: int, gpus: int) -> dict[str, Any]:
    """Return the resource requests and limits of a container.

    The container uses `gpus` GPUs and holds `ram` bytes of weights in memory.
    """
    memory = math.ceil(ram / _GIB) + _FIXED_GIB
    requests = {"cpu": str(_CORES + _CORES_PER_GPU * gpus), "memory": f"{memory}Gi"}
    return {"requests": requests, "limits": {"memory": f"{_LIMIT * memory}Gi"}}


def is_hub_id(checkpoint: str) -> bool:
    """Return True if a build downloads this checkpoint.

    A build does not download a checkpoint whose name is a folder of the claim.
    """
    return HUB_ID.fullmatch(checkpoint) is not None and not checkpoint.startswith((".", "/"))


def egress_rules(settings: GatewaySettings) -> dict[str, list[dict[str, Any]]]:
    """Return the egress rules that the settings' addresses need.

    The rules are grouped by the chart's name of the backend.

    Raises:
        InputError: An address is a file or a socket of one machine, which pods cannot share.
    """
    given = {
        "store": _url(settings.store, "store", "a PostgreSQL (postgresql://…)"),
        "redis": _url(settings.redis, "redis", "a Valkey or Redis (redis://…)"),
        "kafka": [_address(one) for one in settings.kafka.servers.split(",")] if settings.kafka else [],
        "oidc": _oidc(settings),
        "traces": _url(settings.traces.endpoint, "traces.endpoint", "a receiver") if settings.traces else [],
        "extra": [address for one in asked_servers(settings) for address in _url(one.url, "url", "a server")],
    }
    return {name: _rules(addresses) for name, addresses in given.items() if addresses}


def asked_servers(settings: GatewaySettings) -> list[ProviderSettings | HttpFilterSettings]:
    """Return the servers that gateways call: providers, and servers of safety filters."""
    filters = settings.safety.filters.values()
    return [*settings.providers.values(), *(one for one in filters if isinstance(one, HttpFilterSettings))]


def _oidc(settings: GatewaySettings) -> list[tuple[str, int]]:
    urls = [settings.oidc.issuer, settings.oidc.jwks] if settings.oidc else []
    return [address for url in urls for address in _url(url, "oidc.issuer", "a provider")]


def _url(url: str | None, setting: str, kind: str) -> list[tuple[str, int]]:
    if url is None:
        return []
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # The error's text may have a part of the password.
        raise InputError(
            f"gateway.{setting} is not a URL; write @ and / in the user and the password as %40 and %2F."
        ) from None
    scheme = parts.scheme.partition("+")[0].replace("postgres", "postgresql").replace("postgresqlql", "postgresql")
    if not parts.hostname or scheme not in _PORTS:
        raise InputError(
            f"gateway.{setting} is a file or socket of one machine, which the pods of a cluster cannot share: name "
            f"{kind} there."
        )
    return [(parts.hostname, port or _PORTS[scheme])]


def _address(server: str) -> tuple[str, int]:
    host, _, port = server.strip().rpartition(":")
    return host.strip("[]"), int(port)


def _rules(addresses: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return one rule for each different address. Brokers of the same service share a rule."""
    rules: list[dict[str, Any]] = []
    for host, port in addresses:
        peer = _peer(host)
        rule = {**({"to": [peer]} if peer is not None else {}), "ports": [{"port": port}]}
        if rule not in rules:
            rules.append(rule)
    return rules


def _peer(host: str) -> dict[str, Any] | None:
    """Return the NetworkPolicyPeer of a host, or None for a public name.

    Network policies know only addresses and labels.
    """
    try:
        address = ipaddress.ip_address(host)
        return {"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}
    except ValueError:
        labels = host.rstrip(".").split(".")
    if len(labels) == 1:
        return {"podSelector": {}}
    if "svc" in labels[2:]:
        namespace = labels[labels.index("svc", 2) - 1]
        return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return None
