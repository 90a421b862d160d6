"""The tritonserver process: its program, command line, processes, log, shared memory and drain."""
