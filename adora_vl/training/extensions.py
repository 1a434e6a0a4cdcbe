"""Extensions from a file: methods that reach into the training step.

`adora_extensions: {FILE.py:NAME: {OPTION: VALUE}}` names subclasses of `Extension`. docs/examples
has two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from adora_vl.rollout.rollouts import RolloutGroup, RolloutKey
from adora_vl.utils.convert import convert, options_to_dict
from adora_vl.utils.errors import UserError
from adora_vl.utils.own_files import LoadedObject, load_from_file, name_without_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.packing.images import DistinctImages
    from adora_vl.training.advantages import Advantages
    from adora_vl.training.generation import Generation
    from adora_vl.types import Batch, StepContext

EXTENSIONS_KEY = "adora_extensions"


class Extension:
    """A method that reaches into the training step.

    A subclass is a dataclass, and its fields are the options of the run. The checks are made before
    anything is loaded; `start` is called once, when the trainer is built. All ranks call every hook
    in the same order.
    """

    # Whether some rollouts are sampled on other images than those that are learned from.
    changes_images: ClassVar[bool] = False

    def check(self, keys: AdoraGRPOConfig) -> None:
        """Raise `ValueError` for keys of a run that do not fit; its text begins with the option."""

    def check_model(self, model_config: PretrainedConfig) -> None:
        """Raise `ValueError` for a model that does not fit, as `check` does."""

    def costs(self, keys: AdoraGRPOConfig) -> str:
        """Return what the extension costs, for the first lines of the run; empty if nothing."""
        return ""

    def start(self, context: StepContext, images: DistinctImages) -> None:
        """Keep what the hooks need. Raises `UserError` where the model's processor does not fit."""
        self.context: StepContext = context
        self.images: DistinctImages = images

    def images_of(self, group: RolloutGroup, images: list[Any]) -> list[list[Any] | None]:
        """Return the images with which the engine samples each rollout of a training group.

        None stands for the problem's own images. A group that goes on in a later generation is
        asked for its images again, so they may depend on nothing that has changed since.

        Args:
            group: the group, before or while its rollouts are sampled.
            images: the problem's own images.
        """
        return [None] * len(group.rollouts)

    def after_weighing(self, generation: Generation, batch: Batch, advantages: Advantages) -> None:
        """Change a training batch, once its advantages are final: `batch["advantages"]`, (B,).

        There are B rollouts of C tokens. An extension may change the advantages, also to (B, C),
        one for each token.

        Args:
            generation: where in the run the batch was sampled.
            batch: the batch of this rank.
            advantages: the advantages of all ranks, with the groups and the weights behind them.
        """


def configured_extensions(config: AdoraGRPOConfig) -> dict[str, dict[str, Any]]:
    """Return the entries of the key `adora_extensions`, `FILE.py:NAME`, with their options.

    Raises `UserError` for options that are not a mapping.
    """
    return {
        entry: options_to_dict(f"{EXTENSIONS_KEY}.{name_without_file(entry)}", options)
        for entry, options in config.adora_extensions.items()
    }


def _load_extension_class(entry: str) -> LoadedObject:
    """Load the class that an entry of the key names, `FILE.py:NAME`."""

    def is_extension(value: object) -> bool:
        """Return whether a value in the file is a class of an extension."""
        return isinstance(value, type) and issubclass(value, Extension)

    return load_from_file(key=EXTENSIONS_KEY, entry=entry, noun="extension", fits=is_extension)


def extension_hashes(config: AdoraGRPOConfig) -> dict[str, str]:
    """Return a hash of each file that an extension comes from, by the file's name.

    The hash covers the neighbouring files that it imports too.
    """
    classes = [_load_extension_class(entry) for entry in configured_extensions(config)]
    return {loaded_class.file: loaded_class.hash for loaded_class in classes}


def build_extensions(config: AdoraGRPOConfig) -> dict[str, Extension]:
    """Return the run's extensions by the names of their classes, checked against the other keys.

    For example, `{"FILE.py:Noise": {"scale": 0.1}}` gives `{"Noise": Noise(scale=0.1)}`. Raises
    `UserError` for an entry that names no extension, an unknown option or a wrong value.
    """
    extension_by_name: dict[str, Extension] = {}
    for entry, options in configured_extensions(config).items():
        name = name_without_file(entry)
        if name in extension_by_name:
            raise UserError(
                f"{EXTENSIONS_KEY}: two entries have the name {name!r}; rename one of the classes"
            )
        extension: Extension = convert(
            f"{EXTENSIONS_KEY}.{name}", options, _load_extension_class(entry).function_or_class
        )
        if extension.changes_images and not config.use_vllm:
            raise UserError(
                f"{EXTENSIONS_KEY}: {name} samples some rollouts on other images, which needs use_vllm: true"
            )
        if extension.changes_images and config.adora_rollouts.old_logps == "engine":
            raise UserError(
                f"{EXTENSIONS_KEY}: {name} samples some rollouts on other images, where the engine's "
                "log-probabilities are not the policy's; leave out adora_rollouts.old_logps: engine"
            )
        try:
            extension.check(config)
        except ValueError as error:
            raise UserError(f"{EXTENSIONS_KEY}.{name}.{error}") from error
        extension_by_name[name] = extension
    return extension_by_name


def check_extensions(
    extension_by_name: Mapping[str, Extension], model_config: PretrainedConfig
) -> None:
    """Raise `UserError` if an extension does not fit the model.

    Args:
        extension_by_name: the run's extensions.
        model_config: that of the policy.
    """
    for name, extension in extension_by_name.items():
        try:
            extension.check_model(model_config)
        except ValueError as error:
            raise UserError(f"{EXTENSIONS_KEY}.{name}.{error}") from error


def extension_costs(
    extension_by_name: Mapping[str, Extension], config: AdoraGRPOConfig
) -> list[str]:
    """Return a line for each extension that costs something, for the first lines of a run."""
    costs = {name: extension.costs(config) for name, extension in extension_by_name.items()}
    return [f"{name}: {cost}" for name, cost in costs.items() if cost]


def replaced_images(
    extensions: Sequence[Extension],
    groups: Sequence[RolloutGroup],
    rollout_keys: Sequence[RolloutKey],
    trainer_images: Sequence[list[Any] | None],
) -> list[list[Any] | None]:
    """Return for each rollout the images that extensions show the engine in place of the trainer's.

    The entry is None where the engine sees the trainer's images. For example, if an extension shows
    the second of two rollouts a noisy image, the result is `[None, [noisy]]`.

    Args:
        extensions: those of the run. If several replace a rollout's images, the last one counts.
        groups: groups of this rank.
        rollout_keys: for each rollout the number of its group, and its own number in the group.
        trainer_images: for each rollout the images with which the policy learns from it.
    """
    replaced: list[list[Any] | None] = [None] * len(rollout_keys)
    for extension in extensions:
        # An extension is asked once for all rollouts of a group.
        images_by_group: dict[int, list[list[Any] | None]] = {}
        for rollout, (key, images) in enumerate(zip(rollout_keys, trainer_images, strict=True)):
            if not images:
                continue
            if key.group not in images_by_group:
                images_by_group[key.group] = extension.images_of(groups[key.group], images)
            images_of_rollout = images_by_group[key.group][key.rollout_index]
            if images_of_rollout is not None:
                replaced[rollout] = images_of_rollout
    return replaced
