"""The interface of a method that computes advantages: its options, formula and needs of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Protocol,
    get_args,
    get_origin,
    get_type_hints,
)

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


def option(default: object, help: str) -> Any:
    """Return an option of a method: a field of its dataclass.

    What it takes is its annotation; `Literal["length", "difficulty"]` is one of these words.

    Args:
        default: the value if a run does not set the option.
        help: a sentence for the documentation.
    """
    return field(default=default, metadata={"help": help})


def _words_of(annotation: object) -> tuple[str, ...]:
    """The words of a `Literal`, or of a tuple of them; none for another annotation."""
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is not Literal:
        return ()
    words: tuple[str, ...] = get_args(annotation)
    return words


@dataclass(frozen=True)
class Method:
    """A method with its options, which are the fields of its class.

    Each option has a default, and `option` gives it a help. A method of a user's own in a file
    (`adora_method: FILE.py:NAME`) is a subclass too. Its `__post_init__` may raise `ValueError` for
    a value that fits its annotation alone; the text begins with the option. `settings` has the keys
    of TRL that belong to the method, `source` its paper.
    """

    settings: ClassVar[Settings] = {}  # TRL's keys that belong to it
    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a word that is none of the `Literal` of its option.

        The text begins with the name of the option. Python code may build a method by itself, where
        nothing has converted its options.
        """
        hints = get_type_hints(type(self))
        for parameter in fields(self):
            allowed = _words_of(hints[parameter.name])
            value = getattr(self, parameter.name)
            words = value if isinstance(parameter.default, tuple) else (value,)
            for word in words:
                if allowed and word not in allowed:
                    raise ValueError(
                        f"{parameter.name}: {word!r} is not one of {', '.join(allowed)}"
                    )

    @property
    def remakes(self) -> bool:
        """Whether it computes advantages from the rewards and ignores those of earlier methods."""
        return False

    @property
    def plain(self) -> bool:
        """Whether it leaves every advantage as TRL computed it, for any rewards."""
        return False

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """Return the advantages to learn from, (P, G).

        Args:
            groups: all groups of the generation that are learned from, of all ranks.
            advantages_PG: the advantages after the earlier methods.
            run: the scale, lengths and figures of the run.
        """
        return advantages_PG

    def signal(self, groups: Groups, signal_P: Tensor, run: AdvantagePipeline) -> Tensor:
        """Return which groups have something to teach: bool, (P,).

        Args:
            groups: some groups; each is judged alone.
            signal_P: the answer of the earlier methods, bool, (P,).
            run: the scale and lengths of the run.
        """
        if self.remakes:
            return self.apply(groups, torch.zeros_like(groups.rewards_PG), run).any(dim=1)
        return signal_P

    def check(self, keys: RunKeys) -> None:
        """Raise `ValueError` where the method does not fit the keys of the run.

        The text of the error begins with the name of the option or the key.
        """

    def costs(self, keys: RunKeys) -> str:
        """Return the costs beyond GRPO, for the first lines of a run; an empty text means none."""
        return ""
