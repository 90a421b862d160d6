"""The `llmops` command: one thin file per subcommand (parse, call, print)."""
