"""`llmops` commands in this process; forked_cli.py runs them as processes."""

from typing import Any

from click.testing import CliRunner, Result

from llmops.cli.main import cli


def llmops(*words: object, **options: Any) -> Result:
    """Return the result of a command that ends with code 0. An error of ours, or of click's, is raised."""
    result = CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False, **options)
    assert result.exit_code == 0, result.output
    return result
