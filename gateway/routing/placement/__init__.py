"""The choice of a replica for a request.

The package has pure functions and tables, without clocks or event loops. `admission/` decides when
a request is dispatched.
"""
