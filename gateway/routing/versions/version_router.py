"""The choice of the model version that answers a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmops.gateway.http.request_context import RequestContext
from llmops.gateway.routing.replicas.pool_registry import PoolRegistry
from llmops.gateway.routing.served_models import GenerativeModel
from llmops.gateway.routing.versions.version_table import conversation_key

if TYPE_CHECKING:
    from llmops.gateway.routing.versions.version_directory import VersionDirectory


class VersionRouter:
    """A router that chooses each request's version before a tokenizer reads the prompt."""

    def __init__(self, directory: VersionDirectory, pools: PoolRegistry) -> None:
        self._directory, self._pools = directory, pools

    def route(self, model: GenerativeModel, body: object, context: RequestContext) -> GenerativeModel:
        """Return the version of `model` for a request, and record it in `context`.

        If the chosen version has no ready replica, an older version with a ready replica is
        returned.
        """
        context.version = model.version
        if not model.version:
            return model
        name, table = model.parent or model.name, self._directory.table
        conversation = conversation_key(body, context.caller) if table.is_split(name) else ""
        version = table.choose(name, conversation, context.caller.key_id)
        versions = self._pools.versions.get(model.name, {})
        found = versions.get(version)
        if found is None or not found.ready:
            older = (other for other_name, other in versions.items() if other.ready and other_name != version)
            found = next(older, found)
        if found is not None:
            model = found.model
            context.version = model.version
        return model

    def is_judged(self, model: str) -> bool:
        """Return True while a roll-out compares versions of a model."""
        return self._directory.table.is_judged(model)

    def find(self, model: GenerativeModel, version: str) -> GenerativeModel | None:
        """Return a version of `model`, or None if the version has no replica."""
        found = self._pools.versions.get(model.name, {}).get(version)
        return found.model if found is not None else None
