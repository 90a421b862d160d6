"""`python -m llmops.cli` is `llmops`."""

from llmops.cli.main import main

main()
