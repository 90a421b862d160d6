"""The schema of a store, brought to the newest one: whole or not at all, by one process at a time."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, select, table, text
from sqlalchemy import column as sql_column

from llmops.errors import InputError, VersionMismatchError
from llmops.store.database import Store, connect
from llmops.store.tables import SCHEMA, SCHEMA_TABLE, metadata

FOLDER = Path(__file__).parent / "migrations"
# any number will do; PostgreSQL's advisory locks have no names
MIGRATION_LOCK_ID = 0x6C6C6D6F7073
LOCK_TIMEOUT = 3600.0


async def migrate(store: Store, folder: Path = FOLDER, newest: str = SCHEMA) -> None:
    """Raises VersionMismatchError for a schema that this llmops does not know, InputError for a database that holds
    tables of the same names which are not llmops'."""
    async with store.read() as connection:
        found = await connection.run_sync(_version)
    if found == newest:
        return
    # the second process waits for the first, however long its migration takes
    async with connect(store.place, 1, LOCK_TIMEOUT) as patient, patient.write() as connection:
        await connection.run_sync(_upgrade, str(store.place), folder, newest)


def _version(connection: Connection) -> str | None:
    """The schema's revision; None where there is none yet."""
    if not inspect(connection).has_table(SCHEMA_TABLE):
        return None
    return connection.scalar(select(sql_column("version_num")).select_from(table(SCHEMA_TABLE)))


def _upgrade(connection: Connection, place: str, folder: Path, newest: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": MIGRATION_LOCK_ID})
    found = _version(connection)
    # another process may have done it while this one waited for the lock
    if found == newest:
        return
    if found is None:
        _refuse_other_tables(connection, place)
    _run_alembic(connection, place, folder, found)


def _refuse_other_tables(connection: Connection, place: str) -> None:
    taken = sorted(set(inspect(connection).get_table_names()) & set(metadata.tables))
    if taken:
        raise InputError(
            f"The store {place} has tables of another program ({', '.join(taken)}); give llmops a database of its own."
        )


def _run_alembic(connection: Connection, place: str, folder: Path, found: str | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection, "version_table": SCHEMA_TABLE})
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise VersionMismatchError(
            f"The store {place} has schema {found}, which a newer llmops made (this one knows up to {max(known)}); "
            "upgrade llmops here too."
        )
    command.upgrade(config, "head")
