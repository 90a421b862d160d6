"""Twelve ways to install the chart, each named by what is special about it."""

from __future__ import annotations

ONE = {"repository": "/models/one/repository"}
SEVERAL = {
    "repository": "/models/big/repository",
    "gpus": 8,
    "nodes": 2,
    "leaderScript": "#!/bin/bash\nexec mpirun true\n",
    "replicas": 2,
}
STORE = {"store": {"name": "llmops-store"}}
KEYS = {"secrets": STORE, "engines": {"one": ONE}}
SCALED = {"enabled": True, "min": 1, "max": 3}
REQUESTS = 5.5
POSTGRES = [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 5432}]}]
BUILD = ["build", "meta-llama/Llama-3.3-70B-Instruct", "-o", "/models/one/engine", "--target", "tensorrt", "--tp", "8"]
REPO = ["repo", "one=/models/one/engine", "-o", "/models/one/repository"]

VALUES: dict[str, dict] = {
    "open": {"open": True, "control": {"enabled": False}, "engines": {"one": ONE}},
    "keys": KEYS,
    "limits shared, usage by Kafka": {
        **KEYS, "secrets": {**STORE, "redis": {"name": "valkey", "key": "address"}}, "kafka": {"servers": "kafka:9092"},
    },
    "several pools": {
        **KEYS, "engines": {"one": {**ONE, "gpus": 4}, "two": {**ONE, "replicas": 3, "models": ["a", "b"]}},
    },
    "two nodes": {**KEYS, "engines": {"big": SEVERAL}},
    "gateways scaled by Kubernetes": {**KEYS, "gateway": {"autoscaling": {"enabled": True, "max": 5}}},
    "all scaled by KEDA": {
        **KEYS, "keda": {"enabled": True}, "gateway": {"autoscaling": {"enabled": True}},
        "engines": {
            "one": {**ONE, "autoscaling": {**SCALED, "requests": REQUESTS}}, "big": {**SEVERAL, "autoscaling": SCALED},
        },
    },
    "watched": {**KEYS, "monitoring": {"enabled": True, "labels": {"release": "p"}, "key": {"name": "metrics"}}},
    "closed": {
        **KEYS, "monitoring": {"enabled": True},
        "network": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "admins": [{"podSelector": {"matchLabels": {"app": "console"}}}],
            "backends": POSTGRES,
        },
        "engines": {"one": ONE, "big": SEVERAL},
        "builds": {
            "one": {"args": BUILD, "repo": REPO, "gpus": 8, "token": {"name": "hub", "key": "token"}},
            "two": {"args": BUILD},
        },
    },
    "without policies": {**KEYS, "network": {"enabled": False}},
    "placed": {
        **KEYS,
        "image": {"pullSecrets": ["registry"], "engine": {"repository": "registry.example/llmops", "tag": "1"}},
        "engines": {
            "one": {
                **ONE, "nodeSelector": {"gpu": "h100"}, "resources": {"requests": {"cpu": "8"}},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            }
        },
    },
    "long answers": {
        **KEYS,
        "gateway": {
            "drainSeconds": 300,
            "settings": {"workers": 4, "timeouts": {"idle": "120s"}, "slo": {"ttft_p95": "1s"}},
        },
        "engines": {"one": {**ONE, "drainSeconds": 600, "startupMinutes": 5}},
    },
}  # fmt: skip
