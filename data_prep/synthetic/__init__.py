"""Synthetic geometry: problems drawn by us, deterministic from a seed, at any resolution."""
