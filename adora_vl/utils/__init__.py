"""Helpers that any package of this project may use: for errors, files, the command line and more.

None of them knows what a training is.
"""
