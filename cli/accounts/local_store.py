"""The store of this machine's user, and who they are."""

from __future__ import annotations

import getpass
import importlib.util
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from llmops.distribution import missing_extra

if TYPE_CHECKING:
    from llmops.store.audit import AuditContext

_EXTRA = ("sqlalchemy", "alembic", "aiosqlite", "asyncpg")


def default_store() -> str:
    from llmops.cache import cache_dir

    return f"sqlite:///{cache_dir() / 'store.db'}"


def require_store_extra() -> None:
    """Raises MissingDependencyError where what is above the base install is not installed."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise missing_extra(f"A store needs {', '.join(missing)}, which is not installed", "store")


def current_audit_context() -> AuditContext:
    """Who the audit log is told that it was, and now."""
    require_store_extra()
    from llmops.store.audit import AuditContext

    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        # a container's user without a name
        name = str(os.getuid())
    return AuditContext(f"cli:{name}", datetime.now(UTC))
