"""The training config: its keys (one dataclass per topic, joined in `schema`), how they are read from YAML and the
command line, which values each takes, and what is refused before a run starts.
"""

from adora_vl.config.schema import AdoraGRPOConfig, AdoraScriptArguments

__all__ = ["AdoraGRPOConfig", "AdoraScriptArguments"]
