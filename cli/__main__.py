"""The entry point of `python -m llmops.cli`, which is the same as `llmops`."""

from llmops.cli.main import main

main()
