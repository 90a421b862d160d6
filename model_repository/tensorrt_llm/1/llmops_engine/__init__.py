"""The engine model's own code. Runs inside Triton: numpy, triton_python_backend_utils and one runtime library."""
