"""`llmops control`: administration, usage reports and the ledger, beside any number of gateways."""

from pathlib import Path

import click

from llmops.cli.accounts.admin_client import default_store, require_store_extra
from llmops.cli.options import FILE_PATH

PORT = 9100


@click.command("control")
@click.option("--config", type=FILE_PATH, help="YAML file with the gateway's settings.")
@click.option(
    "--store",
    metavar="URL",
    help="sqlite:///FILE or postgresql://…; also $LLMOPS_STORE.  [default: store.db in the cache folder]",
)
@click.option("--kafka", metavar="HOST:PORT,…", help="Kafka brokers to read usage from; also $LLMOPS_KAFKA__SERVERS.")
@click.option("--gateway", metavar="URL", help="Gateway whose models are listed.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="Port to listen on; 0 takes any.")
def command(
    config: Path | None, store: str | None, kafka: str | None, gateway: str | None, host: str, port: int
) -> None:
    """Serve administration and usage over HTTP, and run the jobs that only one process may run.

    Several processes may share a store: all answer requests, one runs the jobs, and another takes
    over the jobs within seconds when the first stops.
    """
    require_store_extra()
    from llmops.cli.local_replicas import CheckedReplicas
    from llmops.connection_errors import check_url
    from llmops.control.app import make_leader_jobs, run
    from llmops.gateway.logging_setup import configure_logging
    from llmops.gateway.settings import load_settings

    if gateway is not None:
        check_url(gateway, "--gateway")
    brokers = {"servers": kafka} if kafka else None
    settings = load_settings(config, host=host, port=port, store=store, kafka=brokers, open=False)
    if settings.store is None:
        settings = settings.model_copy(update={"store": default_store()})
    replicas = CheckedReplicas(settings.replicas or [settings.triton])
    # report missing libraries and settings at the start, not only when this process becomes the
    # leader
    make_leader_jobs(settings, replicas)
    configure_logging(settings.log_level)

    def announce(url: str, keys: bool) -> None:
        from llmops.store.store_url import StoreUrl

        who = "with a key" if keys else "without a key, and administered with one of scope admin only"
        click.echo(f"llmops control listens on {url} (store {StoreUrl.parse(str(settings.store))}), {who}.")

    if run(settings, gateway, announce, replicas):
        raise click.Abort
