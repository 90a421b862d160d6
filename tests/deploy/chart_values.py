"""Twelve sets of values of the chart, each named after its special part."""

DIGEST = "@sha256:" + "0123456789abcdef" * 4
IMAGES = {name: f"registry.example/llmops/{name}{DIGEST}" for name in ("gateway", "engine", "build")}
BASE = {"image": IMAGES, "storage": {"claim": "llmops-models"}}
RESOURCES = {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "128Gi"}}
ONE = {"repository": "/models/one/repository", "resources": RESOURCES}
SEVERAL = {
    "repository": "/models/big/repository", "resources": RESOURCES, "gpus": 8, "nodes": 2, "replicas": 2,
    "leaderScript": "#!/bin/bash\nexec mpirun true\n",
}  # fmt: skip
STORE = {"store": {"name": "llmops-store"}}
POSTGRES = [{"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 5432}]}]
NETWORK = {"network": {"backends": {"store": POSTGRES}}}
KEYS = {**BASE, **NETWORK, "secrets": STORE, "engines": {"one": ONE}}
SCALED = {"enabled": True, "min": 1, "max": 3}
REQUESTS = 5.5
RUNBOOKS = "https://wiki.example/llmops/runbooks"
VALKEY = [{"ports": [{"port": 6379}]}]
KAFKA = [{"ports": [{"port": 9092}]}]
BUILD = ["build", "meta-llama/Llama-3.3-70B-Instruct", "-o", "/models/one/engine", "--target", "tensorrt", "--tp", "8"]
REPO = ["repo", "one=/models/one/engine", "-o", "/models/one/repository"]

VALUES: dict[str, dict] = {
    "open": {**BASE, "open": True, "control": {"enabled": False}, "engines": {"one": ONE}},
    "keys": KEYS,
    "limits shared, usage by Kafka": {
        **KEYS,
        "secrets": {
            **STORE, "redis": {"name": "valkey", "key": "address"},
            "kafka": {"name": "kafka"}, "signing": {"name": "signing"},
        },
        "kafka": {"servers": "kafka:9092", "user": "llmops", "tls": True},
        "network": {"backends": {"store": POSTGRES, "redis": VALKEY, "kafka": KAFKA}},
    },
    "several pools": {
        **KEYS,
        "engines": {
            "one": {**ONE, "gpus": 4}, "two": {**ONE, "replicas": 3, "models": ["a", "b"]},
            "one-v2": {**ONE, "gpus": 4, "version": True}, "big-v2": {**SEVERAL, "version": True},
        },
        "monitoring": {"enabled": True, "runbooks": RUNBOOKS, "key": {"name": "metrics"}},
    },
    "two nodes": {**KEYS, "engines": {"big": SEVERAL}},
    "gateways scaled by Kubernetes": {**KEYS, "gateway": {"autoscaling": {"enabled": True, "max": 5}}},
    "all scaled by KEDA": {
        **KEYS, "keda": {"enabled": True}, "gateway": {"autoscaling": {"enabled": True}},
        "engines": {
            "one": {**ONE, "autoscaling": {**SCALED, "requests": REQUESTS}}, "big": {**SEVERAL, "autoscaling": SCALED},
        },
    },
    "watched": {
        **KEYS,
        "monitoring": {"enabled": True, "runbooks": RUNBOOKS, "labels": {"release": "p"}, "key": {"name": "metrics"}},
    },
    "closed": {
        **KEYS, "monitoring": {"enabled": True, "runbooks": RUNBOOKS, "key": {"name": "metrics"}},
        "network": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "admins": [{"podSelector": {"matchLabels": {"app": "console"}}}],
            "backends": {"store": POSTGRES},
        },
        "engines": {"one": ONE, "big": SEVERAL},
        "builds": {
            "one": {
                "args": BUILD, "finish": ["build", "--resume", "/models/one/engine"], "repo": REPO, "gpus": 8,
                "token": {"name": "hub", "key": "token"}, "resources": RESOURCES,
            },
            "two": {"args": BUILD, "resources": RESOURCES},
        },
    },
    "without policies": {**KEYS, "network": {"enabled": False}},
    "placed": {
        **KEYS,
        "image": {**IMAGES, "pullSecrets": ["registry"], "engine": f"registry.example:5000/llmops:1{DIGEST}"},
        "gateway": {"resources": {"requests": {"cpu": 2, "memory": "1.5Gi"}}},
        "engines": {
            "one": {
                **ONE, "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "reserved", "operator": "Exists", "effect": "NoSchedule"}],
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
