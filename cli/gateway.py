"""`llmops gateway`: serve the OpenAI API from Triton."""

from pathlib import Path
from typing import Any

import click

from llmops.cli.options import FILE_PATH

REPLICA = "A Triton server to use as a replica: HOST:PORT, or dns:NAME:PORT for all addresses of a name; repeatable."


@click.command("gateway")
@click.option("--config", type=FILE_PATH, help="YAML file with settings.")
@click.option("--triton", metavar="HOST:PORT", help="Triton's gRPC endpoint.  [default: 127.0.0.1:8001]")
@click.option("--replica", "replicas", metavar="ADDRESS", multiple=True, help=REPLICA)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes any.  [default: 9000]")
@click.option("--store", metavar="URL", help="Where API keys are stored: sqlite:///FILE or postgresql://….")
@click.option("--open", is_flag=True, default=None, help="Require no API key, even where others can reach the gateway.")
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Number of gateway processes on the same port.  [default: 1]"
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Level of the log.  [default: info]"
)
def command(config: Path | None, replicas: tuple[str, ...], **flags: Any) -> None:
    """Serve the OpenAI API from Triton: requests become gRPC streams.

    Settings come from flags, then LLMOPS_… environment variables (LLMOPS_PORT,
    LLMOPS_TIMEOUTS__IDLE), then --config.
    """
    from llmops.gateway.settings import load_settings

    settings = load_settings(config, replicas=list(replicas) or None, **flags)
    from llmops.gateway.auth.authentication import exposure_summary
    from llmops.gateway.launcher import run
    from llmops.gateway.logging_setup import configure_logging

    configure_logging(settings.log_level)

    def announce(url: str, asked: bool) -> None:
        servers = ", ".join(settings.replicas) or settings.triton
        click.echo(f"llmops gateway listens on {url} (Triton at {servers}), {exposure_summary(settings, asked)}.")

    if run(settings, announce):
        raise click.Abort
