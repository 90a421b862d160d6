"""Parsing of the addresses in the setting `replicas`.

An address is a server, an engine model of a server, or a DNS name for several servers.
"""

from __future__ import annotations

from typing import NamedTuple

DNS_PREFIX = "dns:"
ADDRESS_EXAMPLE = "such as 10.0.0.1:8001 or dns:llama-leaders:8001"


class ReplicaAddress(NamedTuple):
    """The address of a replica.

    Attributes:
        server: HOST:PORT of Triton's gRPC endpoint.
        engine_model: The only model of the server to use, empty for all models. With it, a Triton
            server can have several replicas.
        name: The name under which the model is served, empty for the engine model's own name.
    """

    server: str
    engine_model: str = ""
    name: str = ""


class DnsAddress(NamedTuple):
    """A DNS name that stands for all addresses to which it resolves."""

    host: str
    port: int


def parse_replica(text: str) -> ReplicaAddress | DnsAddress:
    """Parse `HOST:PORT`, `dns:NAME:PORT` or `[NAME=]HOST:PORT/ENGINE_MODEL`.

    Raises:
        ValueError: `text` has another form.
    """
    if text.startswith(DNS_PREFIX):
        host, port = _host_port(text, text.removeprefix(DNS_PREFIX))
        return DnsAddress(host, port)
    name, equals, rest = text.rpartition("=")
    server, slash, engine_model = rest.partition("/")
    if (equals and not (name and engine_model)) or (slash and not engine_model):
        raise ValueError(f"{text!r} names no engine model: write it as NAME=HOST:PORT/ENGINE_MODEL")
    host, port = _host_port(text, server)
    return ReplicaAddress(f"{host}:{port}", engine_model, name)


def format_address(address: ReplicaAddress | DnsAddress) -> str:
    """Return an address in the form that the setting has. For a ReplicaAddress, this is its id."""
    if isinstance(address, DnsAddress):
        return f"{DNS_PREFIX}{address.host}:{address.port}"
    named = f"{address.name}=" if address.name else ""
    model = f"/{address.engine_model}" if address.engine_model else ""
    return f"{named}{address.server}{model}"


def server_address(replica: str) -> str:
    """Return HOST:PORT of the Triton server of a replica.

    Args:
        replica: The id of the replica.
    """
    return replica.rpartition("=")[2].partition("/")[0]


def _host_port(text: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    bare = ":" not in host or (host.startswith("[") and host.endswith("]"))
    if not host or not bare or any(char in host for char in "/= ") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not the address of a replica; write an address {ADDRESS_EXAMPLE}")
    return host, int(port)
