"""Polling of metrics for `llmops top`: gateways, and the engines of gateways with a single Triton."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import httpx
from pydantic import BaseModel

from llmops.cli.monitor.exposition import MetricsPage, MetricsWindow
from llmops.cli.monitor.snapshot import FleetSnapshot, PolledGateway, WorkerStates, make_snapshot, rows_from_gateways
from llmops.connection_errors import check_url
from llmops.errors import InputError
from llmops.gateway.replica_address import DNS_PREFIX, DnsAddress, parse_replica
from llmops.gateway.routing.discovery import resolve_addresses
from llmops.gateway.telemetry.metric_definitions import SERVER_REACHABLE
from llmops.untrusted_text import escape_unsafe
from llmops.urls import failure_reason, fetch_bounded, without_secrets

#: Maximum seconds to open a connection, so that an unreachable gateway does not delay the screen.
CONNECT_TIMEOUT = 2.0
#: Maximum seconds to receive a response, as long as Prometheus waits. A gateway first collects the
#: metrics of its other workers.
READ_TIMEOUT = 10.0


#: Maximum bytes of a response. A gateway with a hundred models and replicas sends about one
#: million.
MAX_PAGE_BYTES = 4 * 2**20


class _ReplicaStates(BaseModel):
    """The fields of a response of GET /replicas that `llmops top` shows."""

    gateways: list[WorkerStates]


class GatewayPoller:
    """A poller of gateways and engines.

    An unreachable gateway becomes a row with its problem, not an error.
    """

    def __init__(self, gateways: Sequence[str], engines: Sequence[str], window: float, key: str | None) -> None:
        """Create a poller without contacting a server.

        Args:
            gateways: URLs, or dns:NAME:PORT for all addresses of a name.
            engines: HOST:PORT of Triton's metrics; by default port 8002 of the gateways' servers.
            window: Length of the metrics window in seconds.
            key: The API key that is sent to the gateways, or None.

        Raises:
            InputError: A URL is invalid.
        """
        self._gateways = [_place(one) for one in gateways]
        self._engines, self._window = engines, window
        # send the key only to gateways, because engines require none and must not see it
        self._key = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT))
        self._recent: dict[str, MetricsWindow] = {}
        self._workers: dict[str, frozenset[str]] = {}

    async def look(self) -> FleetSnapshot:
        """Poll everything and return a snapshot."""
        urls, away = await self._found()
        gateways = [*await asyncio.gather(*map(self._gateway, urls)), *away]
        engines = {} if rows_from_gateways(gateways) else await self._engine_pages(gateways)
        return make_snapshot(gateways, engines)

    async def close(self) -> None:
        await self._http.aclose()

    async def _found(self) -> tuple[list[str], list[PolledGateway]]:
        """Return the gateways' URLs, and the DNS names that have no address."""
        urls: dict[str, None] = {}
        away = []
        for one in self._gateways:
            if isinstance(one, str):
                urls[one] = None
                continue
            try:
                found = await asyncio.wait_for(resolve_addresses(one.host, one.port), CONNECT_TIMEOUT)
                urls.update({f"http://{address}": None for address in found})
            except (TimeoutError, OSError) as error:
                why = getattr(error, "strerror", None) or "no answer"
                away.append(
                    PolledGateway(f"{DNS_PREFIX}{one.host}:{one.port}", MetricsWindow(self._window), f"DNS: {why}")
                )
        return list(urls), away

    async def _gateway(self, url: str) -> PolledGateway:
        recent = self._recent.setdefault(url, MetricsWindow(self._window))
        page, states = await asyncio.gather(self._page(f"{url}/metrics", self._key), self._replica_states(url))
        if isinstance(page, str):
            recent.clear()
            return PolledGateway(without_secrets(url), recent, page)
        workers = frozenset(worker.gateway for worker in states)
        problem = ""
        if workers and not workers & self._workers.setdefault(url, workers):
            # differences between the counters of two processes behind one address have no meaning
            recent.clear()
            problem = (
                "another process than before answers, after a restart or behind a load balancer; name each gateway"
            )
        self._workers[url] = workers or self._workers.get(url, workers)
        recent.add(page)
        return PolledGateway(without_secrets(url), recent, problem, states)

    async def _replica_states(self, url: str) -> Sequence[WorkerStates]:
        """Return the replica states that a gateway reports.

        The result is empty if the gateway has one Triton or the key lacks permission.
        """
        try:
            body = await asyncio.wait_for(
                fetch_bounded(self._http, f"{url}/replicas", MAX_PAGE_BYTES, self._key), READ_TIMEOUT
            )
            return _ReplicaStates.model_validate_json(body).gateways
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL, ValueError):
            return ()

    async def _engine_pages(self, gateways: Sequence[PolledGateway]) -> Mapping[str, MetricsWindow]:
        """Return the metrics pages of the engines that answer, by HOST:PORT."""
        expected = list(self._engines) or _servers(gateways)
        pages = await asyncio.gather(*(self._page(f"http://{one}/metrics") for one in expected))
        found = {}
        for one, page in zip(expected, pages, strict=True):
            if isinstance(page, MetricsPage):
                found[one] = self._recent.setdefault(one, MetricsWindow(self._window))
                found[one].add(page)
        return found

    async def _page(self, url: str, headers: Mapping[str, str] = {}) -> MetricsPage | str:
        """Return a metrics page, or the reason why the page cannot be read."""
        try:
            body = await asyncio.wait_for(fetch_bounded(self._http, url, MAX_PAGE_BYTES, headers), READ_TIMEOUT)
            return MetricsPage(body.decode(), time.monotonic())
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return "nothing answers there"
        except (TimeoutError, httpx.TimeoutException):
            return f"no answer within {READ_TIMEOUT:g} s"
        except httpx.HTTPStatusError as error:
            if error.response.status_code in (401, 403):
                return "asks for a key with the scope metrics: set LLMOPS_API_KEY"
            return f"answers {error.response.status_code} to /metrics"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"the connection broke ({escape_unsafe(failure_reason(error), 100)})"
        except ValueError:
            return "does not answer like a gateway of llmops"


def _place(text: str) -> str | DnsAddress:
    if text.startswith(DNS_PREFIX):
        try:
            name = parse_replica(text)
        except ValueError as error:
            raise InputError(f"--url {text}: write dns:NAME:PORT, such as dns:llm-gateway-each:9000.") from error
        assert isinstance(name, DnsAddress)
        return name
    url = text.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise InputError(
            f"--url {without_secrets(text)} is not a URL: write http://HOST:PORT, or dns:NAME:PORT for several."
        )
    check_url(url)
    return url


def _servers(gateways: Sequence[PolledGateway]) -> list[str]:
    """Return HOST:8002, Triton's usual address of metrics, for each host of gateways' Tritons."""
    hosts = {
        labels.get("server", "").rpartition(":")[0]
        for one in gateways
        if one.recent.last is not None
        for labels, _ in one.recent.last.series(SERVER_REACHABLE.name)
    }
    return sorted(f"{host}:8002" for host in hosts if host)
