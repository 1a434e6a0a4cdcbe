"""Extensions from a file: methods that reach into the training step.

`adora_extensions: {FILE.py:NAME: {OPTION: VALUE}}` names subclasses of `Extension`. docs/examples has
two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from adora_vl.config.values import convert
from adora_vl.rollout.rollouts import RolloutGroup
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import FromFile, from_file, own_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.packing.images import DistinctImages
    from adora_vl.training.advantages import Advantages
    from adora_vl.training.generation import Generation
    from adora_vl.types import Batch, StepContext

KEY = "adora_extensions"


class Extension:
    """A method that reaches into the training step.

    A subclass is a dataclass, and its fields are the options of the run. The checks are made before
    anything is loaded; `start` is called once, when the trainer is built. All ranks call every hook
    in the same order.
    """

    # Whether some rollouts are sampled on other images than those that are learned from.
    changes_images: ClassVar[bool] = False

    def check(self, keys: AdoraGRPOConfig) -> None:
        """Refuse other keys of the run. Raises `ValueError`; its text begins with the option."""

    def check_model(self, model_config: PretrainedConfig) -> None:
        """Refuse a model. Raises `ValueError` as `check` does."""

    def costs(self, keys: AdoraGRPOConfig) -> str:
        """The costs of the extension, for the first lines of the run; empty if it costs nothing."""
        return ""

    def start(self, context: StepContext, images: DistinctImages) -> None:
        """Keep what the hooks need. Raises `UserError` where the model's processor does not fit."""
        self.context: StepContext = context
        self.images: DistinctImages = images

    def images_of(self, group: RolloutGroup, images: list[Any]) -> list[list[Any] | None]:
        """The images that each rollout of a training group sees instead of the problem's `images`.

        None stands for the problem's own images. The images of a group that continues in a later
        generation are asked for again, so they may depend on nothing that has changed since.
        """
        return [None] * len(group.rollouts)

    def after_weighing(self, generation: Generation, batch: Batch, advantages: Advantages) -> None:
        """The advantages of a training batch are final, `batch["advantages"]`, (B,).

        An extension may change them, also to (B, C), one for each token of the completions.

        Args:
            generation: where in the run the batch was sampled.
            batch: of this rank.
            advantages: of all ranks, with the groups and the weights behind them.
        """


def asked_extensions(config: AdoraGRPOConfig) -> dict[str, dict[str, Any]]:
    """The entries of `adora_extensions` with their options. Raises `UserError`."""
    entries = {}
    for entry, options in config.adora_extensions.items():
        if options is not None and not isinstance(options, Mapping):
            raise UserError(
                f"{KEY}.{own_name(entry)}: {options!r:.60} is not a mapping of its options"
            )
        entries[entry] = dict(options or {})
    return entries


def _loaded(entry: str) -> FromFile:
    """The class that an entry of the key names, from its file."""

    def is_extension(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, Extension)

    return from_file(KEY, entry, noun="extension", fits=is_extension)


def extension_hashes(config: AdoraGRPOConfig) -> dict[str, str]:
    """A hash of each file that an extension comes from, with its neighbours."""
    loaded = [_loaded(entry) for entry in asked_extensions(config)]
    return {file.file: file.hash for file in loaded}


def chosen_extensions(config: AdoraGRPOConfig) -> dict[str, Extension]:
    """The run's extensions with their options, by name, checked against the other keys.

    Raises `UserError` for an entry that names none, an unknown option or a wrong value.
    """
    chosen: dict[str, Extension] = {}
    for entry, options in asked_extensions(config).items():
        name = own_name(entry)
        if name in chosen:
            raise UserError(f"{KEY}: two entries have the name {name!r}; rename one of the classes")
        extension: Extension = convert(f"{KEY}.{name}", options, _loaded(entry).value)
        if extension.changes_images and not config.use_vllm:
            raise UserError(
                f"{KEY}: {name} samples some rollouts on other images, which needs use_vllm: true"
            )
        if extension.changes_images and config.adora_rollouts.old_logps == "engine":
            raise UserError(
                f"{KEY}: {name} samples some rollouts on other images, where the engine's "
                "log-probabilities are not the policy's; leave out adora_rollouts.old_logps: engine"
            )
        try:
            extension.check(config)
        except ValueError as error:
            raise UserError(f"{KEY}.{name}.{error}") from error
        chosen[name] = extension
    return chosen


def check_extensions(chosen: Mapping[str, Extension], model_config: PretrainedConfig) -> None:
    """Raise `UserError` where an extension does not fit the model."""
    for name, extension in chosen.items():
        try:
            extension.check_model(model_config)
        except ValueError as error:
            raise UserError(f"{KEY}.{name}.{error}") from error


def extension_costs(chosen: Mapping[str, Extension], config: AdoraGRPOConfig) -> list[str]:
    """What the extensions cost, one line each."""
    costs = {name: extension.costs(config) for name, extension in chosen.items()}
    return [f"{name}: {cost}" for name, cost in costs.items() if cost]


def other_images(
    extensions: Sequence[Extension],
    groups: Sequence[RolloutGroup],
    group_and_member: Sequence[tuple[int, int]],
    images: Sequence[list[Any] | None],
) -> list[list[Any] | None]:
    """The images of each rollout that does not see the trainer's; None for the others.

    Args:
        extensions: of the run; of several that change a rollout's images the last one counts.
        groups: of this rank.
        group_and_member: for each rollout the number of its group, and its own in the group.
        images: the trainer's, for each rollout.
    """
    other_images_by_rollout: list[list[Any] | None] = [None] * len(group_and_member)
    for extension in extensions:
        by_group: dict[int, list[list[Any] | None]] = {}
        for rollout, ((group_number, member), pictures) in enumerate(
            zip(group_and_member, images, strict=True)
        ):
            if not pictures:
                continue
            if group_number not in by_group:
                by_group[group_number] = extension.images_of(groups[group_number], pictures)
            if by_group[group_number][member] is not None:
                other_images_by_rollout[rollout] = by_group[group_number][member]
    return other_images_by_rollout
