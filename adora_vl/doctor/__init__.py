"""`python -m adora_vl.doctor --config FILE.yaml`: will this run work here? Before it costs days.

`result` a line of the table, `versions`, `grading`, `output` what needs no model, `probe` a few real prompts through
the trainer's own engine and its own forward pass, `engine` the checks that this allows, `change` a weight that is
changed and put back, `self_check` the cheap part of it before every training's first step.
"""
