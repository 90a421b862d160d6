"""The slow side: who administers, what was used and what it cost.

Nothing here is in the way of an answer; queries belong to `store/`.
"""
