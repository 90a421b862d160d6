"""Will it fit, how fast will it be, what will it cost: arithmetic on an architecture; nothing is loaded or run.

`gpus` -> `memory/` -> `timing/` -> `speed/` -> `search/` -> `report/`: each knows those before it.
"""
