"""Build targets: one module per target, with an instance of `build_target.BuildTarget`.

Triton's view of a target belongs to `model_repository/targets/`.
"""
