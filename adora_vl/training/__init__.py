"""From the scores of a generation to advantages and micro-batches, and what stops a run that goes
wrong.
"""
