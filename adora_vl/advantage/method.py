"""What a method of making advantages is: its options, its formula, and what it needs from a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from adora_vl.advantage.groups import Groups
    from adora_vl.advantage.methods import AdvantagePipeline

Settings = Mapping[str, object]


class RunKeys(Protocol):
    """The keys of a run that a method may have to fit; a run's config has them."""

    num_generations: int
    max_completion_length: int
    loss_type: str
    use_vllm: bool
    steps_per_generation: int
    num_iterations: int
    gradient_accumulation_steps: int
    multi_objective_aggregation: str
    deepspeed: Any
    adora_rollouts: Any


def option(default: Any, help: str, *choices: str) -> Any:
    """An option of a method: a field of its dataclass.

    `choices`: the words that it takes, or that a list of it has.
    """
    return field(
        default=default, metadata={"help": help, **({"choices": list(choices)} if choices else {})}
    )


@dataclass(frozen=True)
class Method:
    """A method with its options, which are the fields of its class: each has a default, and
    `option` gives it a help.

    One that a run names in a file (`adora_method: FILE.py:NAME`) is a subclass too.
    """

    settings: ClassVar[Settings] = {}  # TRL's keys that belong to it
    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raises `ValueError` for a value that an option does not take; its text begins with the
        option.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            choices = each.metadata.get("choices")
            for word in value if isinstance(each.default, tuple) else (value,):
                if choices and word not in choices:
                    raise ValueError(f"{each.name}: {word!r} is not one of {', '.join(choices)}")

    @property
    def remakes(self) -> bool:
        """Whether it computes advantages from the rewards of a group, and ignores those before it."""
        return False

    @property
    def plain(self) -> bool:
        """Whether it leaves every advantage as TRL computed it, whatever the rewards."""
        return False

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """The advantages to learn from, (P, G), made of those before it."""
        return advantages_PG

    def signal(self, groups: Groups, signal_P: Tensor, run: AdvantagePipeline) -> Tensor:
        """Which groups have something to teach, bool, (P,); `signal_P` says it of the methods
        before it.
        """
        if self.remakes:
            return self.apply(groups, torch.zeros_like(groups.rewards_PG), run).any(dim=1)
        return signal_P

    def check(self, keys: RunKeys) -> None:
        """Raises `ValueError` where the run's other keys do not fit; its text begins with the
        option or the key.
        """

    def costs(self, keys: RunKeys) -> str:
        """What it costs beyond GRPO, for the first lines of the run; nothing is an empty text."""
        return ""
