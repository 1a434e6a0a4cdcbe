"""`python -m adora_vl.train --config FILE --dry-run`: what a run will do and whether it fits, without loading a weight.

`options` the flags, `planning` from arguments to everything that is known beforehand, `lengths` prompts and image
tokens over the dataset, `words` what a person reads, `command` the flow.
"""
