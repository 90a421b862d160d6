"""The lines in which `llmops serve` and `llmops up` say who can reach their servers."""

from llmops.urls import is_loopback

EMBEDDED_HTTP_WARNING = (
    "Triton's HTTP server is on. This embedded Triton (2.51) crashes when any user of this machine sends it "
    "a hostile body (CVE-2025-23310, CVE-2025-23311); leave --http out unless you need it."
)


def describe_exposure(host: str, http_host: str, metrics: bool) -> str:
    """Return the line in which `llmops serve` says who can reach each server.

    The line also names the flag that opens or closes the server.
    """
    servers = {"gRPC": host, **({"metrics": host} if metrics else {}), **({"HTTP": http_host} if http_host else {})}
    open_to_all = [name for name, address in servers.items() if not is_loopback(address)]
    local = [name for name in servers if name not in open_to_all]
    parts = []
    if open_to_all:
        parts.append(
            f"Open to anyone who reaches {host}, without a key: {_join(open_to_all)} (closed by: --host 127.0.0.1)."
        )
    if local:
        parts.append(f"Open to this machine only: {_join(local)}.")
    parts.append("Metrics are closed by --no-metrics." if metrics else "Metrics are off.")
    parts.append("HTTP is closed without --http." if http_host else "HTTP is off; --http opens it.")
    return " ".join(parts)


def describe_stack_exposure(host: str, url: str, grpc: str, metrics: str, keys: bool) -> str:
    """Return the lines in which `llmops up` says who can reach the gateway and Triton.

    Args:
        host: The address of the gateway.
        url: The URL of the gateway.
        grpc: The address of Triton's gRPC.
        metrics: The address of Triton's metrics.
        keys: True if the gateway requires API keys.
    """
    who = "this machine only" if is_loopback(host) else f"anyone who reaches {host}"
    flag = "--host opens it to others" if is_loopback(host) else "--host 127.0.0.1 closes it"
    return (
        f"The gateway {url} is open to {who}, {'with' if keys else 'without'} a key; {flag}.\n"
        f"Triton's gRPC {grpc} and metrics {metrics} are open to this machine only, without a key; its HTTP is off."
    )


def _join(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
