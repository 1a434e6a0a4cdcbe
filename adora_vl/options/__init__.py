"""The `adora_` keys of the training config, one dataclass per topic. `adora_vl.config` joins them."""
