"""Reports as self-contained HTML files (bench, plan, …): the page, its tables, its plots.

What is in a report belongs to whoever makes it.
"""
