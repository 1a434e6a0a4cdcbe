"""Accepts a machine with one GPU: `python -m benchmarks.gpu`.

See "Accepting a GPU" in benchmarks/README.md.
"""
