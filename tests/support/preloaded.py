"""Imports of the process from which tests fork commands."""

from adora_vl.utils.launch import imports_of_a_command

with imports_of_a_command():
    import adora_vl.trainer  # noqa: F401
