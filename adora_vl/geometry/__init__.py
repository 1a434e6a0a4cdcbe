"""The geometry engine: the facts of a diagram in, a figure that fulfils them and its answer out.

It needs numpy alone and knows neither tensors nor rows nor trainers.
"""
