"""adora_vl: GRPO for vision-language models on geometry, with ADORA's dynamic advantages."""

__version__ = "0.1.0"
