"""One build from checkpoint to engine folder: started, resumed, looked at (--dry-run), upgraded.

How an engine is made belongs to `targets/` and `encoder/`.
"""
