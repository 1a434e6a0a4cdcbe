"""Models are judged: asking them, scoring what they answer, and comparing scores.

The benchmarks themselves, with their official rules, and the commands stand in `eval/`.
"""
