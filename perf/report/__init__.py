"""Reports of a run: statistics, JSON, terminal table, HTML page, comparison of two runs.

The style of pages belongs to `llmops/html_pages/`.
"""
