"""The `llmops` command: one thin file per subcommand (parse, call, print).

Whatever another program could want to call belongs to the room that does it.
"""
