"""The training config: its keys (one dataclass per topic, joined in `schema`), how they are read from YAML and the
command line, which values each takes, and what is refused before a run starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig, AdoraScriptArguments

__all__ = ["AdoraGRPOConfig", "AdoraScriptArguments"]


def __getattr__(name: str) -> Any:
    """Both are imported when they are asked for: TRL's classes take seconds, and `first_look` does without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from adora_vl.config import schema

    return getattr(schema, name)
