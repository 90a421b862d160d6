"""Where `key`, `tenant`, `price`, `usage` and `audit` do what they are told: on a store, or through an admin API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from llmops.cli.accounts.local_store import current_audit_context, default_store, require_store_extra

if TYPE_CHECKING:
    from llmops.control.admin.operations import Operation
    from llmops.control.admin.schemas import AdminSchema

RequestT = TypeVar("RequestT", bound="AdminSchema")
ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True)
class AdminBackend:
    """`url`: of an admin API, asked with `api_key`; without one it is the store itself."""

    store: str | None = None
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def do(self, operation: Operation[RequestT, ResponseT], asked: RequestT) -> ResponseT:
        """The same answer, wherever it is done."""
        if self.url:
            from llmops.control.admin.client import AdminClient

            return AdminClient(self.url, self.api_key).do(operation, asked)
        require_store_extra()
        return asyncio.run(self._on_store(operation, asked))

    async def _on_store(self, operation: Operation[RequestT, ResponseT], asked: RequestT) -> ResponseT:
        from llmops.control.admin.handlers import HANDLERS
        from llmops.store.factory import open_store

        async with (
            await open_store(self.store or default_store(), pool_size=1) as store,
            store.write() if operation.writes else store.read() as connection,
        ):
            told: ResponseT = await HANDLERS[operation.name](connection, current_audit_context(), asked)
            return told


def key_reference(typed: str) -> str:
    """What calls a key: its id, or the SHA-256 of the key itself, which is sent to nobody."""
    from llmops.store.accounts.key_secrets import hash_secret

    return hash_secret(typed) if typed.startswith("sk-") else typed
