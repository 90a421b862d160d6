"""Generation of Triton model repositories from engine folders (`generate`), and launches of Triton
on them (`launch`).

The folders with a `1/` hold the models' code. It runs inside Triton and imports nothing from this
package.
"""
