"""The tritonserver, from its program to the way in which it is drained.

The package also has its command line, processes, log and shared memory.
"""
