"""The `adora_` keys of the training config, a dataclass a topic; `adora_vl.config` joins them."""
