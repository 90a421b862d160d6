"""The Kubernetes manifests of a launch on several machines.

A LeaderWorkerSet has one pod per machine, and the leader pod starts MPI.

Source: kubernetes-sigs/lws `config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml` (v1)
and `docs/examples/tensorrt-llm`; triton-inference-server/tutorials
`Deployment/Kubernetes/EKS_Multinode_Triton_TRTLLM`, which also reaches the other pods through
`kubectl exec`.
"""

import re
from typing import Any

from llmops.errors import InputError
from llmops.model_repository.multi_gpu.multi_node import (
    MultiNodePlan,
    join_shell_command,
    render_script,
    server_assignment,
)
from llmops.yaml_files import write_yaml

SCRIPTS_DIR = "/llmops"
MPI_RSH_AGENT = f"{SCRIPTS_DIR}/kubessh"
_KUBESSH = """#!/bin/sh
# mpirun runs this as it would run ssh: HOST COMMAND...
pod=$1
shift
exec kubectl exec "$pod" -- /bin/sh -c "$*"
"""


def lws_manifests(plan: MultiNodePlan, claim: str) -> str:
    """Return the YAML for `kubectl apply`.

    `claim` is the PersistentVolumeClaim whose root is `plan.root`.
    """
    if len(plan.root.parts) < 2:
        folders = " and ".join(str(folder) for folder in plan.folders)
        raise InputError(f"{folders} have no common parent folder that could be one volume: move them into one folder.")
    name = _dns_name(plan.name)
    documents = [
        *_rights(name, plan),
        _scripts(name, plan),
        _group(name, plan, claim),
        _service(name, plan),
    ]
    return write_yaml(*documents)


def _dns_name(name: str) -> str:
    """Return a name that is valid for Kubernetes objects.

    A valid name has lower-case letters, digits and dashes, and begins with a letter. A name such as
    `a-0` or `a-triton` gets a suffix, because objects of the LeaderWorkerSet `a` have such names.
    """
    plain = re.sub(r"[^a-z0-9]", "-", name.lower()).strip("-")[:40].strip("-")
    plain = plain if plain[:1].isalpha() else f"llm-{plain}"
    return f"{plain}-llm" if re.search(r"-([0-9]+|triton)$", plain) else plain


def _rights(name: str, plan: MultiNodePlan) -> list[dict[str, Any]]:
    """Return the leader's service account and its rights, which name the pods of this group."""
    workers = [f"{name}-0-{index}" for index in range(1, plan.nodes)]
    resources = {"pods": ["get", "list", "watch"], "pods/exec": ["create", "get"]}
    rules = [
        {"apiGroups": [""], "resources": [resource], "verbs": verbs, "resourceNames": workers}
        for resource, verbs in resources.items()
        # an empty list of names would grant the rights for every pod
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


def _scripts(name: str, plan: MultiNodePlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-launch"},
        "data": {"leader.sh": leader_script(plan), "kubessh": _KUBESSH},
    }


def leader_script(plan: MultiNodePlan) -> str:
    """Return the script that the leader pod runs."""
    return render_script(
        "leader.sh.j2",
        nodes=plan.nodes,
        gpus_per_node=plan.gpus_per_node,
        world_size=plan.world_size,
        agent=MPI_RSH_AGENT,
        leader=join_shell_command(plan.leader),
        follower=join_shell_command(plan.follower),
        server=server_assignment(plan.server),
        grpc=plan.options.ports.grpc,
        exit_timeout=plan.options.exit_timeout,
    )


def _group(name: str, plan: MultiNodePlan, claim: str) -> dict[str, Any]:
    leader = _container("leader", plan) | {
        "command": ["/bin/bash", f"{SCRIPTS_DIR}/leader.sh"],
        "env": [{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "ports": [{"name": name, "containerPort": port} for name, port in plan.open_ports.items()],
        # an engine of many GPUs takes minutes to load, and no pod may be killed meanwhile
        "startupProbe": _probe(plan, period=10, failures=360),
        "readinessProbe": _probe(plan, period=5, failures=3),
        "livenessProbe": _probe(plan, period=10, failures=6),
    }
    worker = _container("worker", plan) | {"command": ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"]}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": plan.nodes,
                # MPI cannot replace a lost rank, so all pods of the group restart
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _pod(name, "leader", leader, plan, claim),
                "workerTemplate": _pod(name, "worker", worker, plan, claim),
            },
        },
    }


def _pod(name: str, role: str, container: dict[str, Any], plan: MultiNodePlan, claim: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"app": name, "role": role}},
        "spec": {
            # only the leader uses the API server
            **({"serviceAccountName": name} if role == "leader" else {"automountServiceAccountToken": False}),
            "terminationGracePeriodSeconds": plan.options.exit_timeout + 30,
            "containers": [container],
            "volumes": [
                {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
                {"name": "launch", "configMap": {"name": f"{name}-launch", "defaultMode": 0o755}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        },
    }


def _container(role: str, plan: MultiNodePlan) -> dict[str, Any]:
    gpus = str(plan.gpus_per_node)
    return {
        "name": role,
        "image": plan.image,
        "resources": {"limits": {"nvidia.com/gpu": gpus}, "requests": {"nvidia.com/gpu": gpus}},
        # RDMA needs pinned memory
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": str(plan.root), "readOnly": True},
            {"name": "launch", "mountPath": SCRIPTS_DIR},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def _probe(plan: MultiNodePlan, period: int, failures: int) -> dict[str, Any]:
    """Return a probe of gRPC's health service, which succeeds while every model is ready."""
    return {
        "grpc": {"port": plan.options.ports.grpc},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _service(name: str, plan: MultiNodePlan) -> dict[str, Any]:
    ports = [{"name": name, "port": port} for name, port in plan.open_ports.items()]
    selector = {"leaderworkerset.sigs.k8s.io/name": name, "role": "leader"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-triton"},
        # headless, so that the gateway sees every replica instead of one address
        "spec": {"clusterIP": "None", "selector": selector, "ports": ports},
    }
