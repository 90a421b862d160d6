"""LiteLLM's proxy, with limits that it keeps in Redis.

Its own keys are in PostgreSQL by way of Prisma, whose engines are on no package registry. So it gets its key from a
function (`custom_auth`), for which it looks up nothing, and it writes no spend.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llmops.perf.lab.harness.servers import free_port
from llmops.perf.lab.harness.stack import Service, process, wait_ready
from llmops.perf.lab.mock_engine.repository import NAME
from llmops.perf.lab.peers.environment import peer_python

# requests and tokens per minute
MANY = 1_000_000_000
KEY = "sk-bench"
# it refuses a weak key; nobody uses this one
_MASTER = "sk-0b6c3f5e9a7d48219c"
_AUTH = f"""
from litellm.proxy._types import UserAPIKeyAuth


async def check(request, api_key):
    if api_key != "{KEY}":
        raise ValueError("unknown key")
    limits = {{"tpm_limit": {MANY}, "rpm_limit": {MANY}, "team_tpm_limit": {MANY}, "team_rpm_limit": {MANY}}}
    return UserAPIKeyAuth(api_key=api_key, team_id="bench", **limits)
"""
_CONFIG = """
model_list:
  - model_name: {name}
    litellm_params: {{model: openai/{name}, api_base: "{upstream}", api_key: none}}
litellm_settings:
  cache: true
  cache_params: {{type: redis, host: 127.0.0.1, port: {port}, mode: default_off}}
general_settings: {{custom_auth: auth.check}}
"""


@contextlib.contextmanager
def litellm(upstream: str, redis_port: int) -> Iterator[Service]:
    """The proxy in front of the OpenAI API at `upstream`, ready."""
    python, port = peer_python("litellm"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "auth.py").write_text(_AUTH)
        config = Path(folder, "config.yaml")
        config.write_text(_CONFIG.format(name=NAME, upstream=upstream, port=redis_port))
        program = str(python.parent.absolute() / "litellm")
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        # without a network it would try three times to fetch prices
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": _MASTER, "PYTHONPATH": folder}
        with process(command, None, env) as (pid, _):
            wait_ready(f"http://127.0.0.1:{port}/health/liveliness")
            yield Service(f"http://127.0.0.1:{port}/v1", pid)
