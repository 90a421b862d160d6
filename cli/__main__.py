"""Entry point of `python -m llmops.cli`, which is `llmops`."""

from llmops.cli.main import main

main()
