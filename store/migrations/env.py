"""Alembic's entry point, which runs the migrations.

They run on the connection, and in the transaction, that `llmops.store.migrate` passes.
"""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    version_table=context.config.attributes["version_table"],
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
