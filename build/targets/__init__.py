"""What `build` can make: one module per target behind `base.Target`.

What Triton needs to know of a target belongs to `model_repository/targets/`.
"""
