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

TrlKeys = Mapping[str, object]


class RunKeys(Protocol):
    """The keys of a run that a method may have to fit; a run's config has them."""

    num_generations: int
    max_completion_length: int
    loss_type: str
    use_vllm: bool
    steps_per_generation: int
    num_iterations: int
    gradient_accumulation_steps: int


def option(default: object, help: str) -> Any:
    """Declare an option of a method: a field of its dataclass with a help text.

    The annotation of the field says what values it takes. `Literal["length", "difficulty"]` takes
    one of these words.

    Args:
        default: the value if a run does not set the option.
        help: a sentence for the documentation.
    """
    return field(default=default, metadata={"help": help})


def _allowed_words(annotation: object) -> tuple[str, ...]:
    """Return the words that an annotation `Literal[...]` or `tuple[Literal[...], ...]` allows.

    Any other annotation gives an empty tuple.
    """
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is not Literal:
        return ()
    words: tuple[str, ...] = get_args(annotation)
    return words


@dataclass(frozen=True)
class Method:
    """A method that computes advantages, or changes those of the methods before it.

    The fields of its dataclass are its options, each declared by `option`. Users write subclasses
    too (`adora_method: FILE.py:NAME`). A subclass may check further in `__post_init__`, and raises
    a `ValueError` that begins with the name of the option. `settings` has the keys of TRL that
    belong to the method, `source` its paper. There are P groups of G rollouts.
    """

    settings: ClassVar[TrlKeys] = {}  # TRL's keys that belong to it
    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a word that the `Literal` annotation of its option does not list.

        The text begins with the name of the option. A config file is checked when it is read; this
        is for Python code that builds a method itself.
        """
        annotations = get_type_hints(type(self))
        for option_field in fields(self):
            allowed_words = _allowed_words(annotations[option_field.name])
            if not allowed_words:
                continue
            value = getattr(self, option_field.name)
            words = value if isinstance(option_field.default, tuple) else (value,)
            for word in words:
                if word not in allowed_words:
                    raise ValueError(
                        f"{option_field.name}: {word!r} is not one of {', '.join(allowed_words)}"
                    )

    @property
    def starts_from_rewards(self) -> bool:
        """Whether it computes advantages from the rewards and ignores those of earlier methods."""
        return False

    @property
    def keeps_trl_advantages(self) -> bool:
        """Whether it leaves every advantage as TRL computed it, for any rewards."""
        return False

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """Return the advantages to learn from, (P, G). This base class leaves them as they are.

        Args:
            groups: all groups of the generation that are learned from, of all ranks.
            advantages_PG: the advantages after the earlier methods.
            run: the pipeline that calls this, with the settings and the metrics of the run.
        """
        return advantages_PG

    def groups_with_signal(
        self, groups: Groups, has_signal_P: Tensor, run: AdvantagePipeline
    ) -> Tensor:
        """Return which groups get an advantage other than 0, so that they can be learned from.

        Args:
            groups: some groups. The answer for one must not depend on the others.
            has_signal_P: what the earlier methods returned, bool, (P,).
            run: the pipeline that calls this, with the settings of the run.

        Returns a bool tensor, (P,).
        """
        if not self.starts_from_rewards:
            # It changes earlier advantages, and none of them to or from 0.
            return has_signal_P
        # It computes advantages anew and ignores earlier ones, so zeros serve as well as any.
        ignored_PG = torch.zeros_like(groups.rewards_PG)
        return self.apply(groups, ignored_PG, run).any(dim=1)

    def check(self, keys: RunKeys) -> None:
        """Raise `ValueError` where the method does not fit the keys of the run.

        The text of the error begins with the name of the option or the key.
        """

    def idle_options(self) -> dict[str, str]:
        """Return the options that change nothing beside the others, each with the reason.

        For example, `{"tau": "criteria without difficulty"}`. They are named before a run if they
        differ from their defaults.
        """
        return {}

    def costs(self, keys: RunKeys) -> str:
        """Return the costs beyond GRPO, for the first lines of a run; an empty text means none."""
        return ""
