"""The `llmops` command: one file per subcommand that parses options, calls another room and prints.

Code that other programs could call belongs to the room that does the work.
"""
