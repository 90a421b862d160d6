"""The first schema: the tables as they are now, because no store has been released yet.

The result of a revision must not change once a later revision builds on it. Before a revision
changes one of these tables, replace `create_all` with the statements that `alembic revision
--autogenerate` writes for an empty database.
"""

from alembic import op

from llmops.store.tables import metadata

revision = "0006"
down_revision = None


def upgrade() -> None:
    metadata.create_all(op.get_bind())
