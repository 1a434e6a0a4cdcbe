"""Asking a model: engines, prompts, and predictions that go on where they stopped."""
