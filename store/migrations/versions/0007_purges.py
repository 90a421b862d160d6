"""The table of purges."""

from alembic import op

from llmops.store.tables import purges

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    # a new store has the table from the first revision
    purges.create(op.get_bind(), checkfirst=True)
