"""The benchmarks, one file each, with their official rules, and the commands that run them.

Everything that they share stands below, in `adora_vl.evals`.
"""
