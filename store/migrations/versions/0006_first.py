"""The first schema: the tables as they are, because no release has made a store yet.

What a revision makes must not change any more once another one changes it. So before a revision
changes one of these tables, `create_all` becomes the statements that `alembic revision
--autogenerate` writes for an empty database.
"""

from alembic import op

from llmops.store.tables import metadata

revision = "0006"
down_revision = None


def upgrade() -> None:
    metadata.create_all(op.get_bind())
