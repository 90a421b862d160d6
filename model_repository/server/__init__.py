"""The tritonserver itself: where the binary is, its command line, its processes, log and memory, and draining it.

Nothing here knows what is in a model repository, and nothing starts a server: that is `launch`.
"""
