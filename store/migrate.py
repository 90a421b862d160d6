"""Migration of a store's schema to the newest revision.

A migration happens completely or not at all, in one process at a time.
"""

from pathlib import Path

from sqlalchemy import Connection, inspect, select, table, text
from sqlalchemy import column as sql_column

from llmops.errors import InputError, VersionMismatchError
from llmops.store.database import Store, connect
from llmops.store.tables import SCHEMA, SCHEMA_TABLE, metadata

FOLDER = Path(__file__).parent / "migrations"
#: Number of the advisory lock in PostgreSQL that migrations hold. The value is arbitrary, but must
#: never change.
MIGRATION_LOCK_ID = 0x6C6C6D6F7073
LOCK_TIMEOUT = 3600.0


async def migrate(store: Store, folder: Path = FOLDER, newest: str = SCHEMA) -> None:
    """Migrate a store to the newest schema.

    Raises:
        VersionMismatchError: A newer llmops made the schema, or a version before the first release.
        InputError: The database has tables of another program. In PostgreSQL, only tables with the
            same names count.
    """
    async with store.read() as connection:
        found = await connection.run_sync(_version)
    if found == newest:
        return
    # no timeout: another process may hold the lock for as long as its migration takes
    async with connect(store.location, 1, LOCK_TIMEOUT) as patient, patient.write() as connection:
        await connection.run_sync(_upgrade, str(store.location), folder, newest)


def _version(connection: Connection) -> str | None:
    """Return the schema's revision, or None for an empty database."""
    if not inspect(connection).has_table(SCHEMA_TABLE):
        return None
    return connection.scalar(select(sql_column("version_num")).select_from(table(SCHEMA_TABLE)))


def _upgrade(connection: Connection, location: str, folder: Path, newest: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK_ID})
    found = _version(connection)
    # check again under the lock: another process may have migrated meanwhile
    if found == newest:
        return
    if found is None:
        _refuse_other_tables(connection, location)
    _run_alembic(connection, location, folder, found)


def _refuse_other_tables(connection: Connection, location: str) -> None:
    taken = set(inspect(connection).get_table_names())
    # Programs may share a schema of PostgreSQL. A SQLite file that has only other tables is the
    # wrong file, or has the log of another file. As a store without keys, it would let everyone in.
    if connection.dialect.name == "postgresql":
        taken &= set(metadata.tables)
    if taken:
        names = ", ".join(sorted(taken)[:5])
        raise InputError(
            f"The store {location} has tables of another program ({names}); give llmops a database of its own."
        )


def _run_alembic(connection: Connection, location: str, folder: Path, found: str | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection, "version_table": SCHEMA_TABLE})
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found < min(known):
        raise VersionMismatchError(
            f"The store {location} has schema {found}, made before the first release, which is not migrated; "
            "name another store."
        )
    if found is not None and found not in known:
        raise VersionMismatchError(
            f"The store {location} has schema {found}, which a newer llmops made (this one knows up to {max(known)}); "
            "upgrade llmops here too."
        )
    command.upgrade(config, "head")
