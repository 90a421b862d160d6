"""The choice of a replica for a request.

The package has pure functions and tables, without a clock or an event loop.

The package `admission/` decides when a request is dispatched.
"""
