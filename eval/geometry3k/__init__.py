"""Geometry3K, and any other dataset that `data_prep` made, graded as in training."""
