"""The training config: its keys and their ranges, how they are read, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adora_vl.config.keys import AdoraScriptArguments
    from adora_vl.config.schema import AdoraGRPOConfig

__all__ = ["AdoraGRPOConfig", "AdoraScriptArguments"]


def __getattr__(name: str) -> Any:
    """Import a config class when it is first used.

    The classes inherit from TRL's, whose import takes seconds. The module `command` in this package
    does without them, so the package itself must not import them.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from adora_vl.config import schema

    return getattr(schema, name)
