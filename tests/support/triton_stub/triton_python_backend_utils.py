"""Stands in for the module that exists only inside Triton: the constant that model code reads at import."""

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
