"""The `llmops` command, with one module per subcommand.

A subcommand parses options, calls another package of llmops and prints the result. Code that other
programs could call belongs to the package that does the work.
"""
