"""The blocks of options among the keys: how a generation is filled, and the methods that nobody has
reproduced here. Beside its options each has what it needs from a run, and its costs, as a method
has (`advantage/method.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from adora_vl.models.families import family_of, sees_images
from adora_vl.utils.own_files import LONGEST_S, SHORTEST_S

# Of NoisyRollout: its strength at the beginning, the largest one, and the unit of both.
_NOISE = {"gaussian": (500.0, 999, "diffusion steps"), "rotate": (15.0, 180, "degrees")}


def key(default: Any, help: str, *, choices: Sequence[str] | None = None) -> Any:
    """A field of a dataclass of keys.

    `default`: also a function that makes one. `choices`: the words that it takes.
    """
    made: dict[str, Any] = (
        {"default_factory": default} if callable(default) else {"default": default}
    )
    return field(**made, metadata={"help": help} | ({"choices": list(choices)} if choices else {}))


@dataclass(frozen=True)
class RolloutOptions:
    """How a generation is filled. Replay is SSR of VL-Rethinker (arXiv 2504.08837)."""

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
    replay: Annotated[int, Field(ge=0)] = key(
        0,
        "Sample replay: keep up to so many groups with signal per process, and learn from some of "
        "them again in the places of groups whose advantages are all zero; 0 is off.",
    )
    replay_alpha: Annotated[float, Field(ge=0)] = key(
        1.0, "A kept group is drawn with a chance like the sum of its |advantages| to this power."
    )

    def costs(self, keys: Any) -> list[str]:
        """What replay costs, for the first lines of the run."""
        kept = (
            f"sample replay: up to {self.replay} groups per process, in memory and every checkpoint"
        )
        clip = (
            "sample replay: without TRL's delta, a token of a wrong answer that is likely by now "
            "is not clipped"
        )
        return [kept, *([clip] if keys.delta is None else [])] if self.replay else []


@dataclass(frozen=True)
class ToolOptions:
    """The limits of what tools say."""

    max_pixels: Annotated[int, Field(ge=28 * 28)] | None = key(
        None, "Largest picture that a tool shows, in pixels; null: as the problem's."
    )
    seconds: Annotated[float, Field(ge=SHORTEST_S, le=LONGEST_S)] = key(
        10.0, "That a call of a tool of your own may take."
    )
    calls_per_turn: Annotated[int, Field(ge=1)] = key(4, "Calls that are answered in one turn.")
    turn_tokens: Annotated[int, Field(ge=1)] | None = key(
        None, "Tokens that a turn may have; null: as many as max_completion_length leaves."
    )
    max_text: Annotated[int, Field(ge=1)] = key(2000, "Characters that a tool may return.")
    images: Annotated[int, Field(ge=1)] = key(
        8, "Pictures in a conversation, the problem's among them."
    )


class ExtensionKind:
    """The options of a method that reaches into the step. `keys`: the run's config."""

    @property
    def on(self) -> bool:
        """Whether it does anything."""
        return False

    def check(self, keys: Any) -> None:
        """Raises `ValueError` where the run's other keys do not fit; its text begins with the
        option.
        """

    def check_model(self, config: Any) -> None:
        """Raises `ValueError`, as `check`, where this Transformers config of a model does not fit."""

    def costs(self, keys: Any) -> list[str]:
        """What it costs, for the first lines of the run."""
        return []


@dataclass(frozen=True)
class NoiseOptions(ExtensionKind):
    """NoisyRollout (arXiv 2504.13055)."""

    share: Annotated[float, Field(ge=0, lt=1)] = key(
        0.0,
        "This share of each group's rollouts sees a distorted image, all are learned from on the "
        "clean one. The authors use 0.5; 0 is off.",
    )
    kind: str = key("gaussian", "gaussian (the authors' choice) or rotate.", choices=[*_NOISE])
    strength: Annotated[float, Field(ge=0)] | None = key(
        None,
        "At the beginning: diffusion steps of 1,000 for gaussian (the authors use 400 to 500), "
        "degrees for rotate; null: 500 or 15.",
    )
    schedule: str = key(
        "sigmoid",
        "sigmoid (falls to 0 along a sigmoid) or constant.",
        choices=["sigmoid", "constant"],
    )
    middle: Annotated[float, Field(ge=0, le=1)] = key(
        0.667, "Share of the run after which the sigmoid is at half; the authors' 40 of 60."
    )
    steepness: Annotated[float, Field(gt=0)] = key(
        30.0, "Steepness of the sigmoid over the whole run; the authors use 30."
    )

    def __post_init__(self) -> None:
        _, strongest, unit = _NOISE[self.kind]
        if self.at_first > strongest:
            raise ValueError(f"strength: {self.at_first:g} must be at most {strongest} {unit}")

    @property
    def on(self) -> bool:
        return self.share > 0

    @property
    def at_first(self) -> float:
        """The strength at the beginning of a run, in the unit of the kind."""
        return _NOISE[self.kind][0] if self.strength is None else self.strength

    def count(self, generations: int) -> int:
        """Distorted rollouts per group.

        Raises `ValueError` if the share does not give whole ones.
        """
        count = self.share * generations
        half = max(1, generations // 2) / generations
        if abs(count - round(count)) > 1e-6:
            found = f"share: {self.share} of num_generations: {generations} is {count:g} rollouts"
            raise ValueError(f"{found}; choose a share that gives a whole number, such as {half:g}")
        return round(count)

    def check(self, keys: Any) -> None:
        if self.count(keys.num_generations) and not keys.use_vllm:
            where = "use_vllm: true, where a rollout can see another image than its group"
            raise ValueError(f"share: {self.share} needs {where}; else set it to 0")


@dataclass(frozen=True)
class VisualOptions(ExtensionKind):
    """VPPO (arXiv 2510.09285)."""

    share: Annotated[float, Field(gt=0, le=1)] = key(
        1.0,
        "The share of each rollout's tokens that the loss learns from, those that depend most on "
        "the image. The authors use 0.4; 1 learns from all.",
    )
    scale_min: Annotated[float, Field(ge=0, le=1)] = key(
        1.0,
        "The factor of the advantage of the rollout that depends least on its image; the factors "
        "of all have a mean of 1. The authors use 0.9; 1 leaves all alike.",
    )

    @property
    def on(self) -> bool:
        return self.share < 1 or self.scale_min < 1

    @property
    def _asked(self) -> str:
        return f"share: {self.share}" if self.share < 1 else f"scale_min: {self.scale_min}"

    def check(self, keys: Any) -> None:
        loss = keys.loss_type
        mask = keys.off_policy_mask_threshold
        per_rollout = (
            "loss_type: vespo"
            if loss == "vespo"
            else f"off_policy_mask_threshold: {mask}"
            if mask
            else ""
        )
        if self.on and per_rollout:
            takes = f"{per_rollout} takes one per rollout, so leave that out"
            raise ValueError(f"{self._asked} gives each token an advantage of its own; {takes}")

    def check_model(self, config: Any) -> None:
        if self.on and not sees_images(config):
            raise ValueError(f"{self._asked} needs a model that sees images; leave it out")
        if self.on and family_of(config) is None:
            known = f"a model whose image patches are known, and {config.model_type} is none"
            raise ValueError(f"{self._asked} needs {known}; set it to 1")

    def costs(self, keys: Any) -> list[str]:
        return (
            ["visual dependency: each generation is also passed with half of every image black"]
            if self.on
            else []
        )


@dataclass(frozen=True)
class ExtensionOptions:
    """Methods that nobody has reproduced here; all are off by default."""

    noisy_rollouts: NoiseOptions = key(
        NoiseOptions, "NoisyRollout: share, kind, strength, schedule, middle, steepness."
    )
    visual_tokens: VisualOptions = key(VisualOptions, "VPPO: share, scale_min.")
