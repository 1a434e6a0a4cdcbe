"""How a run learned, in one phrase: for the page, the comparison of runs and the card of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# As their papers write them
NAMES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "lite_ppo": "Lite PPO",
    "dapo": "DAPO",
    "daro": "DARO",
    "mc_grpo": "MC-GRPO",
    "ngrpo": "NGRPO",
    "a_grae": "A-GRAE",
    "canon": "CANON",
    "d3s": "D3S",
    "ssb": "SSB",
    "rrb": "RRB",
}
_GRPO_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")  # they differ in how they average, and methods set them


def methods_of(config: Mapping[str, Any]) -> list[str]:
    """The names in `adora_method`, which records of early runs lack."""
    return [name.strip() for name in str(config.get("adora_method") or "adora").split("+")]


def recipe_of(config: Mapping[str, Any]) -> str:
    """Such as `GRPO`, `ADORA attenuation, factor 0.1` or `DAPO + ADORA attenuation, factor 0.1, noisy rollouts 0.5`."""
    named = [_adora(config) if method == "adora" else NAMES.get(method, method) for method in methods_of(config)]
    return ", ".join([" + ".join(name for name in named if name) or NAMES["grpo"], *_additions(config)])


def adora_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Mode and factor of ADORA by their keys, and whatever `adora_method_options` says of it instead or beside."""
    block = config.get("adora_method_options") or {}
    block = json.loads(block) if isinstance(block, str) else block
    own = block.get("adora", block)
    keys = {"mode": config.get("adora_mode") or "attenuation", "factor": config.get("adora_factor")}
    return {**keys, **(own if isinstance(own, Mapping) else {})}


def _adora(config: Mapping[str, Any]) -> str:
    options = adora_options(config)
    if options["mode"] == "off":
        return ""
    assigned = "" if options.get("assign", "criterion") == "criterion" else f", assign {options['assign']}"
    steps = f", steps {options['steps']}" if options.get("steps") else ""
    return f"ADORA {options['mode']}, factor {options['factor']}{assigned}{steps}"


def _additions(config: Mapping[str, Any]) -> list[str]:
    """What any method can have beside it."""
    noisy, replayed = config.get("adora_noisy_rollouts") or 0, config.get("adora_replay_groups") or 0
    tokens, scale = config.get("adora_visual_tokens", 1), config.get("adora_visual_scale_min", 1)
    loss = str(config.get("loss_type") or "grpo")
    found = {
        f"{loss.upper()} loss": loss not in _GRPO_LOSSES,
        f"noisy rollouts {noisy}": noisy,
        f"visual tokens {tokens}": tokens != 1,
        f"visual scale from {scale}": scale != 1,
        f"replay of {replayed} groups": replayed,
    }
    return [text for text, present in found.items() if present]
