"""A sink that sends events to Kafka as CloudEvents, from where the ledger reads them.

All events of a tenant go to the same partition.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from llmops.clocks import wait_with_timeout
from llmops.errors import ResourceError
from llmops.gateway.interfaces import UsageEvent
from llmops.gateway.settings import KafkaSettings
from llmops.gateway.usage.event_formats import to_cloud_event
from llmops.gateway.usage.signing import SIGNATURE_HEADER, signature, signing_keys
from llmops.gateway.usage.sink import UsageSink

#: Seconds after which brokers that have not accepted a batch count as unavailable.
PRODUCE_TIMEOUT = 20.0


class KafkaSink(UsageSink):
    """A sink that sends events to a Kafka topic, from which the ledger reads them.

    Brokers may lose events that they accepted, so only `ledger` confirms events. Events may be sent
    twice: the ledger keeps each event once. Creating the sink raises InputError without a signing
    key.
    """

    def __init__(self, settings: KafkaSettings, ledger: UsageSink) -> None:
        self._settings, self._ledger = settings, ledger
        self._key = signing_keys(settings)[0]
        self._producer: AIOKafkaProducer | None = None

    async def write(self, events: Sequence[UsageEvent]) -> None:
        try:
            await wait_with_timeout(PRODUCE_TIMEOUT, self._write(events))
        except (TimeoutError, KafkaError, OSError) as error:
            # The events of the batch are not confirmed, and will be sent again.
            await self._drop()
            raise ResourceError(f"{kafka_error_message(self._settings, error)}") from error

    async def confirmed(self, ids: Sequence[str]) -> frozenset[str]:
        return await self._ledger.confirmed(ids)

    async def next_number(self, gateway_id: str) -> int:
        return await self._ledger.next_number(gateway_id)

    async def close(self) -> None:
        await self._drop()
        await self._ledger.close()

    async def _write(self, events: Sequence[UsageEvent]) -> None:
        if self._producer is None:
            producer = AIOKafkaProducer(acks="all", **client_options(self._settings))
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            self._producer = producer
        await asyncio.gather(*[await self._send(self._producer, event) for event in events])

    async def _send(self, producer: AIOKafkaProducer, event: UsageEvent) -> Any:
        value = to_cloud_event(event)
        signed = [(SIGNATURE_HEADER, signature(self._key, value))]
        key = event.tenant_id.encode("utf-8", "replace") or None
        return await producer.send(self._settings.topic, value, key=key, headers=signed)

    async def _drop(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                await asyncio.wait_for(producer.stop(), 1.0)
            except (TimeoutError, KafkaError, OSError):
                return


#: Milliseconds after which clients look again for the topic's partitions. With aiokafka's five
#: minutes, the events of new partitions would be billed as late.
METADATA_MAX_AGE_MS = 30_000


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """Return the connection options of aiokafka's clients.

    Also silences the log of aiokafka, because callers report each failure once.
    """
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {
        "bootstrap_servers": settings.servers,
        "client_id": "llmops",
        "metadata_max_age_ms": METADATA_MAX_AGE_MS,
    }
    sasl = settings.user is not None
    options["security_protocol"] = f"{'SASL_' if sasl else ''}{'SSL' if settings.tls else 'PLAINTEXT'}"
    if settings.tls:
        options["ssl_context"] = ssl.create_default_context()
    if sasl:
        options |= {
            "sasl_mechanism": settings.mechanism,
            "sasl_plain_username": settings.user,
            "sasl_plain_password": settings.password or "",
        }
    return options


def kafka_error_message(settings: KafkaSettings, error: BaseException) -> str:
    """Return one sentence about a Kafka failure, without the text of the client library."""
    name = type(error).__name__.removesuffix("Error")
    return (
        f"Kafka at {settings.servers} cannot write or read events of the topic {settings.topic} ({name}); "
        "check kafka.servers, the user's password and permissions, and the brokers' log."
    )
