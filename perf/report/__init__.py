"""Reports of a run: statistics, JSON, a table for the terminal, an HTML page, and comparisons.

The style of HTML pages is defined in `llmops/html_pages/`.
"""
