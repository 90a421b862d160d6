"""What `build` can make: one module per target behind `base.Target`."""
