"""The training config: its keys and their ranges, how they are read, and what is refused before a
run starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adora_vl.config.keys import AdoraScriptArguments
    from adora_vl.config.schema import AdoraGRPOConfig

__all__ = ["AdoraGRPOConfig", "AdoraScriptArguments"]


def __getattr__(name: str) -> Any:
    """Both are imported when they are asked for: TRL's classes take seconds, and `command` does
    without them.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from adora_vl.config import schema

    return getattr(schema, name)
