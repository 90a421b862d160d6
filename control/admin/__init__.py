"""Administration: operations that are done on a store (`work/`), served over HTTP (`routes`), asked for (`client`).

What a caller may see of its own is in `control/usage_api.py`.
"""
