"""The checks before a run, which the command, the dry run, the doctor and Python make in one order.

`run_checks` in `run_checks.py` lists them. A check raises `UserError` with one line for what cannot
work. It appends a line to `CheckMessages.unchecked` where it cannot look, which only a dry run
meets. docs/architecture.md says how to add one.
"""
