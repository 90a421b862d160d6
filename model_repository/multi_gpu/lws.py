"""Kubernetes manifests: a LeaderWorkerSet, one pod per machine, and what its leader needs to start MPI.

Source: kubernetes-sigs/lws `config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml` (v1) and
`docs/examples/tensorrt-llm`; triton-inference-server/tutorials `Deployment/Kubernetes/EKS_Multinode_Triton_TRTLLM`,
where mpirun reaches the other pods through `kubectl exec` as well.
"""

from __future__ import annotations

from typing import Any

import yaml

from llmops.errors import InputError
from llmops.model_repository.multi_gpu.multi_node import MultiNodePlan, join_shell_command, render

SCRIPTS_DIR = "/llmops"
MPI_RSH_AGENT = f"{SCRIPTS_DIR}/kubessh"
_KUBESSH = """#!/bin/sh
# mpirun runs this as it would run ssh: HOST COMMAND...
pod=$1
shift
exec kubectl exec "$pod" -- /bin/sh -c "$*"
"""


def lws_manifests(cluster: MultiNodePlan, claim: str) -> str:
    """YAML for `kubectl apply`. `claim`: the PersistentVolumeClaim whose root is `cluster.root`, read by all pods."""
    if len(cluster.root.parts) < 2:
        folders = " and ".join(str(folder) for folder in cluster.folders)
        raise InputError(f"{folders} have no common parent folder that could be one volume: put them under one.")
    name = _dns_name(cluster.name)
    documents = [
        *_rights(name, cluster),
        _scripts(name, cluster),
        _group(name, cluster, claim),
        _service(name, cluster),
    ]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _dns_name(name: str) -> str:
    """Names of Kubernetes objects have lower-case letters, digits and dashes, and start with a letter."""
    plain = "".join(char if char.isalnum() else "-" for char in name.lower()).strip("-")[:50]
    return plain if plain[:1].isalpha() else f"llm-{plain}"


def _rights(name: str, cluster: MultiNodePlan) -> list[dict[str, Any]]:
    """Return a service account for the leader and its rights, which name the pods of this group."""
    workers = [f"{name}-0-{index}" for index in range(1, cluster.nodes)]
    resources = {"pods": ["get", "list", "watch"], "pods/exec": ["create", "get"]}
    rules = [
        {"apiGroups": [""], "resources": [resource], "verbs": verbs, "resourceNames": workers}
        for resource, verbs in resources.items()
        # an empty list of names would mean every pod
        if workers
    ]
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name}],
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        },
    ]


def _scripts(name: str, cluster: MultiNodePlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-launch"},
        "data": {"leader.sh": leader_script(cluster), "kubessh": _KUBESSH},
    }


def leader_script(cluster: MultiNodePlan) -> str:
    """What the leader pod runs."""
    return render(
        "leader.sh.j2",
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        world_size=cluster.world_size,
        agent=MPI_RSH_AGENT,
        leader=join_shell_command(cluster.leader),
        follower=join_shell_command(cluster.follower),
        grpc=cluster.ports.grpc,
        exit_timeout=cluster.exit_timeout,
    )


def _group(name: str, cluster: MultiNodePlan, claim: str) -> dict[str, Any]:
    leader = _container("leader", cluster) | {
        "command": ["/bin/bash", f"{SCRIPTS_DIR}/leader.sh"],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": name, "containerPort": port} for name, port in cluster.open_ports.items()],
        # an engine of many GPUs takes minutes to load, during which nothing may be killed
        "startupProbe": _probe(cluster, period=10, failures=360),
        "readinessProbe": _probe(cluster, period=5, failures=3),
        "livenessProbe": _probe(cluster, period=10, failures=6),
    }
    worker = _container("worker", cluster) | {"command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"]}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": cluster.nodes,
                # MPI cannot replace a lost rank
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _pod(name, "leader", leader, cluster, claim),
                "workerTemplate": _pod(name, "worker", worker, cluster, claim),
            },
        },
    }


def _pod(name: str, role: str, container: dict[str, Any], cluster: MultiNodePlan, claim: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app": name, "role": role}},
        "spec": {
            # only the leader speaks to the API server
            **({"serviceAccountName": name} if role == "leader" else {"automountServiceAccountToken": False}),
            "terminationGracePeriodSeconds": cluster.exit_timeout + 30,
            "containers": [container],
            "volumes": [
                {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
                {"name": "launch", "configMap": {"name": f"{name}-launch", "defaultMode": 0o755}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
    }


def _container(role: str, cluster: MultiNodePlan) -> dict[str, Any]:
    gpus = str(cluster.gpus_per_node)
    return {
        "name": role,
        "image": cluster.image,
        "resources": {"limits": {"nvidia.com/gpu": gpus}, "requests": {"nvidia.com/gpu": gpus}},
        # RDMA needs pinned memory
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "models", "mountPath": str(cluster.root), "readOnly": True},
            {"name": "launch", "mountPath": SCRIPTS_DIR},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _probe(cluster: MultiNodePlan, period: int, failures: int) -> dict[str, Any]:
    """gRPC's own health service, which Triton has: serving while every model is ready."""
    return {
        "grpc": {"port": cluster.ports.grpc},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _service(name: str, cluster: MultiNodePlan) -> dict[str, Any]:
    ports = [{"name": name, "port": port} for name, port in cluster.open_ports.items()]
    selector = {"leaderworkerset.sigs.k8s.io/name": name, "role": "leader"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-triton"},
        # headless: the gateway sees every replica instead of one address in front of them
        "spec": {"clusterIP": "None", "selector": selector, "ports": ports},
    }
