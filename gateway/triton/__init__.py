"""The tensor contract (docs/contract.md) from the client's side: requests, streams, messages.

Knows no API; which of several servers is asked belongs to `fleet/`.
"""
