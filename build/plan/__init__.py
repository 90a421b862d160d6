"""Plan capacity: the memory, speed and cost of a model on GPUs.

Every figure is computed from the model's architecture, without loading or running the model. Of
`gpu_specs`, `memory`, `timing`, `speed`, `search` and `report`, each imports only modules that come
before it.
"""
