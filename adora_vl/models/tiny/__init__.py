"""A Qwen2.5-VL of under a million parameters, built from scratch: the real classes at a size that a laptop trains."""
