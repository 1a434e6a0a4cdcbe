"""When does attenuation help?

Six ways to weigh groups, in four regimes, on a task whose answers are guesses or chains.

The question, the design and the results are in docs/experiments.md.
"""
