"""The one road into a run: the command, the dry run, the doctor and Python walk the same checks in
the same order. A check is a stop of `CHECKS` in `road.py`. It raises `UserError` with one line for
what cannot work, and appends a line to `unknown` where it cannot look, which only a dry run meets.
"""
