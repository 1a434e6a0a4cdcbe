"""What is claimed, measured again: one command each, `python -m benchmarks.NAME`.

README.md has the figures.
"""
