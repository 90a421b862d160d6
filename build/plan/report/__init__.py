"""What the planner found, in the terminal and as a page.

Which candidates there are, and which is best, belongs to `search/`.
"""
