"""The table `purges`."""

from alembic import op

from llmops.store.tables import purges

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    # a new store already has the table, because the first revision creates all tables
    purges.create(op.get_bind(), checkfirst=True)
