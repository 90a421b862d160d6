"""The engine model's own code. Runs inside Triton: numpy, triton_python_backend_utils and one runtime library.

What it shares with the gateway is copied beside it: the tensor contract, turns and block names.
"""
