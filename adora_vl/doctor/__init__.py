"""`python -m adora_vl.doctor --config FILE.yaml` says whether a run will work on this machine.

It says so before the run costs days. To add a check, write a function that returns a `Check` with
its remedy: in `checks` and called in `__main__` if it needs no model, and in `engine`, in the list
of `_check_groups`, otherwise. Add a test that breaks what the check looks at;
`tests/integration/doctor_run.py` has the engine for it.
"""
