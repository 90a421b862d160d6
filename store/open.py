"""The one way to a store."""

from __future__ import annotations

from llmops.store.database import Store, connect
from llmops.store.migrate import migrate
from llmops.store.place import Place


async def open_store(url: str, pool_size: int = 5) -> Store:
    """Open the store at `url`, made or migrated first where it has to be.

    Raises InputError for a URL, password or file that is wrong, VersionMismatchError for a newer schema, ResourceError
    for a server or disk that does not do its part.
    """
    place = Place.parse(url)
    place.create()
    store = connect(place, pool_size)
    try:
        await migrate(store)
    except BaseException:
        await store.close()
        raise
    return store
