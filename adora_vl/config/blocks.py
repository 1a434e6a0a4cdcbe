"""The blocks of options among the keys: how a generation is filled, and the limits of tools."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from adora_vl.utils.call_guards import MAX_DEADLINE_S, MIN_DEADLINE_S


def key(default: Any, help: str) -> Any:
    """Declare a config key as a field of a dataclass; its annotation says which values it takes.

    `default`: the default, or a function that returns it. `help`: the text of `--help-all`.
    """
    metadata = {"help": help}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RolloutOptions:
    """The options of `adora_rollouts`: how a generation is filled."""

    refill: Annotated[int, Field(ge=0)] = key(
        0,
        "DAPO's dynamic sampling: sample further problems up to so many times per generation, to "
        "replace groups whose advantages are all zero.",
    )
    budget: (
        Annotated[int, Field(ge=1)]
        | Annotated[str, Field(pattern="^auto$", description="auto")]
        | None
    ) = key(
        None,
        "Partial rollouts: stop a generation after so many tokens and go on with unfinished "
        "answers in the next one; auto: the length that nine of ten of the last answers had at "
        "most, where the longest are much longer. Null: all are sampled to their ends.",
    )
    ahead: Annotated[int, Field(ge=0, le=4)] = key(
        0,
        "vLLM servers that get weights by files sample so many generations ahead, while the "
        "policy learns: each by the weights of so many generations before. 0: one after the "
        "other.",
    )
    staleness: Annotated[int, Field(ge=1)] = key(
        4, "With a budget, answers begun so many generations ago are sampled to their end."
    )
    old_logps: Literal["policy", "engine"] = key(
        "policy",
        "Whose log-probabilities new ones are compared with: the policy's before the first update, "
        "or the engine's, without a pass for them (verl's bypass_mode); engine needs "
        "vllm_importance_sampling_correction: false.",
    )


@dataclass(frozen=True)
class ToolOptions:
    """The options of `adora_tool_options`: the limits of tool calls and their replies."""

    max_pixels: Annotated[int, Field(ge=28 * 28)] | None = key(
        None, "Largest picture that a tool shows, in pixels; null: as the problem's."
    )
    seconds: Annotated[float, Field(ge=MIN_DEADLINE_S, le=MAX_DEADLINE_S)] = key(
        10.0, "That a call of a tool of your own may take."
    )
    turn_tokens: Annotated[int, Field(ge=1)] | None = key(
        None, "Tokens that a turn may have; null: as many as max_completion_length leaves."
    )
    max_text: Annotated[int, Field(ge=1)] = key(2000, "Characters that a tool may return.")
    images: Annotated[int, Field(ge=1)] = key(
        8, "Pictures in a conversation, the problem's among them."
    )
