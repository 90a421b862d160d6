"""What a run says afterwards: statistics, JSON, terminal table, HTML page, comparison of two runs.

How a page looks belongs to `llmops/html_pages/`.
"""
