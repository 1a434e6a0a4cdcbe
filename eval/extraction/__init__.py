"""Finds the answer in a response by rules, without a model. The surest rules are tried first."""
