"""How a model is laid out over GPUs and what of their memory its weights, cache and buffers take."""
