"""The tritonserver: its program, command line, processes, log and shared memory, and how it is
drained.
"""
