"""The methods that compute the advantages: built once from `adora_method`, and checked.

A run's config has the built methods as `config.methods`; the key itself has all their options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adora_vl.advantage import METHODS, AdvantagePipeline, Groups, Method, group_advantages
from adora_vl.advantage.adora import Adora
from adora_vl.config.sharding import Sharding
from adora_vl.utils.call_guards import OverdueError, deadline
from adora_vl.utils.cli import to_json_types, yaml_line
from adora_vl.utils.convert import convert, options_to_dict, refuse_unknown_options
from adora_vl.utils.errors import UserError, describe_error, did_you_mean
from adora_vl.utils.own_files import (
    LOAD_TIMEOUT_S,
    LoadedObject,
    function_name,
    is_function,
    is_users_file,
    load_from_file,
    name_without_file,
    source_hash,
)

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# An entry beside a method's options in `adora_method`. A method may set keys of TRL; those that
# this entry lists it leaves as they are.
KEEP_SETTINGS = "keep_settings"

# Methods that TRL has under keys of its own.
TRL_KEYS_BY_METHOD = {
    "gspo": "importance_sampling_level: sequence, epsilon: 3e-4, epsilon_high: 4e-4, loss_type: "
    "grpo, beta: 0.0",
    "lite_ppo": "scale_rewards: batch, loss_type: dapo",
    **{name: f"loss_type: {name}" for name in ("bnpo", "sapo", "vespo")},
    "cispo": "loss_type: cispo, epsilon_high: 5.0",
    "luspo": "loss_type: luspo, importance_sampling_level: sequence",
}


@dataclass(frozen=True)
class UserFunction(Method):
    """A function of the user's, `(groups, advantages) -> advantages`, as a method."""

    function: Callable[[Groups, Tensor], Tensor]

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """Call the user's function."""
        return self.function(groups, advantages_PG)


@dataclass(frozen=True, kw_only=True)
class ConfiguredMethod:
    """One method for computing advantages, as a run's config names it.

    `entry`: its name in `adora_method`: NAME, or FILE.py:NAME. `method`: the built method.
    `options`: its options as plain values. `kept_keys`: the keys of TRL that it would set, but that
    the user wants left as they are (`keep_settings`).
    """

    entry: str
    method: Method
    options: Mapping[str, Any]
    kept_keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MethodSet:
    """The methods of a run in their order, built once.

    `configured`: the methods. `hashes`: a hash of each Python file and of each function that a
    method of the user's comes from, for the run's fingerprint. `notes`: a line for each key of TRL
    that a method has changed.
    """

    configured: tuple[ConfiguredMethod, ...]
    hashes: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def by_name(self) -> dict[str, Method]:
        """The methods by name; one from a file is named without the file."""
        return {
            name_without_file(configured.entry): configured.method for configured in self.configured
        }

    def options(self) -> dict[str, dict[str, Any]]:
        """Return the options of all methods, complete and in the form that `adora_method` has."""
        options_by_entry: dict[str, dict[str, Any]] = {}
        for configured in self.configured:
            options = {**configured.options}
            if configured.kept_keys:
                options[KEEP_SETTINGS] = list(configured.kept_keys)
            options_by_entry[configured.entry] = options
        return options_by_entry


def replace_functions_by_names(value: Any) -> tuple[Any, dict[str, Any]]:
    """Replace the functions that Python code passes as `adora_method` by their names.

    Python code may pass a function `(groups, advantages) -> advantages` or a subclass of `Method`,
    alone or as a key of the mapping of methods to their options.

    Returns the value with names in place of functions, and the functions and classes by name. For
    example, `{"dapo": {}, clip: {"low": 0}}` with a function `clip` gives
    `{"dapo": {}, "clip": {"low": 0}}` and `{"clip": clip}`.

    Raises `UserError` for a function or class that has the name of a built-in method.
    """
    if callable(value):
        name = _name_of_python_method(value)
        return {name: {}}, {name: value}
    if not isinstance(value, Mapping):
        return value, {}
    functions: dict[str, Any] = {}
    options_by_name: dict[Any, Any] = {}
    for method, options in value.items():
        if callable(method):
            name = _name_of_python_method(method)
            functions[name] = method
            options_by_name[name] = options
        else:
            options_by_name[method] = options
    return options_by_name, functions


def _name_of_python_method(method: Any) -> str:
    """Return the name of a function or class that Python code passes as a method.

    Raises `UserError` for the name of a built-in method, and for a class that is no `Method`.
    """
    name = function_name(method)
    if name in METHODS:
        raise UserError(
            f"adora_method: the function {name!r} has the name of a method that is here; rename it"
        )
    if inspect.isclass(method) and not issubclass(method, Method):
        raise UserError(
            f"adora_method: the class {name!r} is no subclass of adora_vl.advantage.Method"
        )
    return name


def build_methods(value: str | Mapping[str, Any], functions: Mapping[str, Any]) -> MethodSet:
    """Build the methods that the value of `adora_method` names, in their order.

    Args:
        value: Names joined by `+`, or a mapping of each name to its options. A name is that of a
            built-in method, FILE.py:NAME, or that of one of `functions`.
        functions: Functions and classes that Python code has passed, by name.

    Raises `UserError` for an unknown method or option, and for a wrong value. A method that
    computes its advantages from the rewards must be the first, since it would overwrite the
    advantages of the methods before it.
    """
    configured_methods: list[ConfiguredMethod] = []
    hashes: dict[str, str] = {}
    options_by_name = _options_by_method(value, functions)
    for name, options in options_by_name.items():
        kept_keys = options.pop(KEEP_SETTINGS, [])
        if is_users_file(name):
            loaded = _load_from_file(name)
            hashes[loaded.file] = loaded.hash
            method = _build_method(name, loaded.function_or_class, options)
        elif name in functions:
            hashes[name] = source_hash(functions[name])
            method = _build_method(name, functions[name], options)
        else:
            method = _build_method(name, METHODS[name], options)
        # A function has only the options that were set. Any other method is a dataclass, whose
        # fields are its options, defaults included.
        all_options = options if isinstance(method, UserFunction) else to_json_types(method)
        configured_methods.append(
            ConfiguredMethod(
                entry=name,
                method=method,
                options=all_options,
                kept_keys=_check_kept_keys(name, kept_keys, method),
            )
        )
    for configured in configured_methods[1:]:
        if configured.method.starts_from_rewards:
            raise UserError(
                f"adora_method: {'+'.join(options_by_name)}: "
                f"{name_without_file(configured.entry)} starts "
                "from the rewards, so it must stand first"
            )
    return MethodSet(configured=tuple(configured_methods), hashes=hashes)


def build_methods_and_set_keys(config: AdoraGRPOConfig, functions: Mapping[str, Any]) -> MethodSet:
    """Build the methods of a config that is being constructed, and let them change its keys.

    A method may set keys of TRL, such as the loss that its paper uses. The key `adora_method`
    itself becomes the mapping of all methods to all of their options, defaults included.

    Returns the methods, with a note for the user about each key that changes.

    `functions`: functions and classes that Python code has passed, by name. Raises `UserError`.
    """
    methods = build_methods(config.adora_method, functions)
    notes: list[str] = []
    for configured in methods.configured:
        for key, value in configured.method.settings.items():
            value_before = getattr(config, key)
            if key in configured.kept_keys or value_before == value:
                continue
            setattr(config, key, value)
            notes.append(
                f"{configured.entry} sets {key}: {value} (was {value_before}; {KEEP_SETTINGS}: [{key}] "
                "leaves it)"
            )
    config.adora_method = methods.options()
    return replace(methods, notes=tuple(notes))


def _options_by_method(
    value: str | Mapping[str, Any], functions: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the options that are set for each method in the value of `adora_method`, in order.

    `functions`: functions and classes that Python code has passed, by name. Raises `UserError` for
    an unknown method, a method that is named twice, and options that are no mapping.
    """
    if isinstance(value, str):
        names = [name.strip() for name in value.split("+")]
        if len(set(names)) < len(names):
            raise UserError(f"adora_method: {value} names a method twice")
        value = dict.fromkeys(names)
    options_by_name: dict[str, dict[str, Any]] = {}
    for name, options in value.items():
        if not (name in METHODS or name in functions or is_users_file(str(name))):
            raise _unknown_method(str(name))
        key = f"adora_method.{name_without_file(name)}"
        options_by_name[name] = options_to_dict(key, options)
    return options_by_name


def _unknown_method(name: str) -> UserError:
    """Return the error for a name in `adora_method` that is no method.

    Some methods of the literature are keys of TRL, such as `loss_type: cispo`; these are proposed.
    """
    trl_keys = TRL_KEYS_BY_METHOD.get(name.lower())
    if trl_keys is not None:
        return UserError(
            f"adora_method: {name} is in TRL's own keys; set {trl_keys}, and adora_method: grpo or "
            "adora"
        )
    remedy = f"use one of {', '.join(METHODS)}{did_you_mean(name, METHODS)}"
    return UserError(f"adora_method: unknown method {name!r}, {remedy}")


def _load_from_file(name: str) -> LoadedObject:
    """Load a method of the user's, a function or a subclass of `Method`, from FILE.py:NAME.

    Raises `UserError` where the file has neither under this name.
    """

    def is_method(value: object) -> bool:
        return is_function(value) or (isinstance(value, type) and issubclass(value, Method))

    return load_from_file(key="adora_method", entry=name, noun="method", fits=is_method)


def _check_kept_keys(name: str, keep_settings: object, method: Method) -> tuple[str, ...]:
    """Return the keys of TRL that the option `keep_settings` forbids a method to set.

    `keep_settings`: one key or a list, as the user wrote it. Raises `UserError` for a key that the
    method does not set in any case.
    """
    keys = [keep_settings] if isinstance(keep_settings, str) else keep_settings
    if not isinstance(keys, list) or any(str(key) not in method.settings for key in keys):
        keys_of_method = ", ".join(method.settings) or "none"
        raise UserError(
            f"adora_method.{name_without_file(name)}.{KEEP_SETTINGS}: {keys!r} must list keys "
            f"that {name} sets: "
            f"{keys_of_method}"
        )
    return tuple(keys)


def _build_method(
    name: str,
    class_or_function: type[Method] | Callable[..., Tensor],
    options: dict[str, Any],
) -> Method:
    """Build a method from its class or function, and its options.

    The options of a class are its fields. Those of a function are its parameters after the first
    two, which are the groups and the advantages.

    `name`: NAME or FILE.py:NAME, for errors. Raises `UserError` for an option that the method does
    not have, and for a wrong value.
    """
    key = f"adora_method.{name_without_file(name)}"
    if isinstance(class_or_function, type):
        method: Method = convert(key, options, hint=class_or_function)
        return method
    parameters = [*inspect.signature(class_or_function).parameters][2:]
    refuse_unknown_options(key, options, parameters)
    function = partial(class_or_function, **options) if options else class_or_function
    return UserFunction(function)


def check_methods(config: AdoraGRPOConfig) -> None:
    """Check that the other keys of a config fit its methods, and call the user's own methods once.

    Raises `UserError` for keys that do not fit, and for a method of the user's that fails.
    """
    if config.adora_method != config.methods.options():
        raise UserError(
            "adora_method: it was set after the config was made, when its methods are built; give "
            "it to AdoraGRPOConfig(adora_method=...)"
        )
    for name, method in config.methods.by_name.items():
        # A method that starts from the rewards gets their sum.
        if (
            method.starts_from_rewards
            and config.multi_objective_aggregation != "sum_then_normalize"
        ):
            raise UserError(
                f"adora_method: {name} needs multi_objective_aggregation: sum_then_normalize, one "
                "reward each"
            )
        try:
            method.check(config)
        except ValueError as error:
            # The text of the error begins with what is wrong: an option of the method, or a key.
            wrong_name = str(error).partition(":")[0]
            is_option = wrong_name in {option.name for option in fields(method)}
            prefix = f"adora_method.{name}." if is_option else ""
            raise UserError(f"{prefix}{error}") from error
        if name not in METHODS:
            _try_method(name, method, config)


def check_methods_fit_sharding(config: AdoraGRPOConfig, sharding: Sharding) -> None:
    """Raise `UserError` where ADORA is to scale the learning rate of a run with DeepSpeed."""
    adora = config.methods.by_name.get("adora")
    scales_learning_rate = isinstance(adora, Adora) and adora.assign == "rate"
    if sharding.zero_stage is not None and scales_learning_rate:
        raise UserError(
            "adora_method.adora.assign: rate does not work with DeepSpeed, which takes its "
            "optimizer step before its learning rate can be scaled; train without DeepSpeed or "
            "with assign: criterion"
        )


def _try_method(name: str, method: Method, config: AdoraGRPOConfig) -> None:
    """Call a method of the user's once before the run, to see that it returns finite advantages.

    It gets two prompts: one with a single correct rollout, and one where all rollouts fail, so that
    their advantages are all zero. Raises `UserError` where it fails, takes too long, or returns
    something else.
    """
    # P: prompts, G: rollouts of each prompt
    rewards_PG = torch.zeros(2, config.num_generations)
    rewards_PG[0, 0] = 1.0
    lengths_PG = torch.full_like(rewards_PG, config.max_completion_length)
    none_truncated_PG = torch.zeros_like(rewards_PG, dtype=torch.bool)
    groups = Groups(
        rewards_PG=rewards_PG,
        lengths_PG=lengths_PG,
        truncated_PG=none_truncated_PG,
        # Any finite values will do.
        surprisal_PG=lengths_PG,
    )
    pipeline = AdvantagePipeline({name: method})
    advantages_PG = group_advantages(rewards_PG)
    try:
        with deadline(LOAD_TIMEOUT_S):
            # A clone, since the method may change the advantages in place.
            result = method.apply(groups, advantages_PG.clone(), pipeline)
            is_valid = (
                isinstance(result, Tensor)
                and result.shape == advantages_PG.shape
                and bool(result.isfinite().all())
            )
    except (Exception, OverdueError) as error:
        raise UserError(
            f"adora_method: {name}, tried before the run: {describe_error(error)}"
        ) from error
    if not is_valid:
        raise UserError(
            f"adora_method: {name}, tried before the run: it returned {result!s:.60}, not finite "
            f"advantages of shape {tuple(advantages_PG.shape)}"
        )


def build_pipeline(config: AdoraGRPOConfig) -> AdvantagePipeline:
    """Build what computes the advantages of a run: its methods in their order, and their state."""
    return AdvantagePipeline(
        config.methods.by_name,
        scale=str(config.scale_rewards),
        max_length=config.max_completion_length,
        sums_rewards=config.multi_objective_aggregation == "sum_then_normalize",
        seed=config.seed,
    )


def _notes_on_idle_options(name: str, method: Method) -> list[str]:
    """Return a line for each option of a method that was set, and changes nothing in this run."""
    lines: list[str] = []
    reasons = method.idle_options()
    for option_field in fields(method):
        value = to_json_types(getattr(method, option_field.name))
        reason = reasons.get(option_field.name)
        if reason is not None and value != to_json_types(option_field.default):
            if isinstance(value, tuple):  # YAML has lists alone
                value = list(value)
            lines.append(
                f"adora_method.{name}.{option_field.name}: {yaml_line(value)} does nothing with "
                f"{reason}"
            )
    return lines


def notes_on_methods(config: AdoraGRPOConfig) -> list[str]:
    """Return lines about the methods of a run, for its start.

    They say which keys of TRL the methods set, which of their options change nothing, and what they
    compute beyond GRPO, in words. Most methods cost nothing.
    """
    lines = [*config.methods.notes]
    for name, method in config.methods.by_name.items():
        lines += _notes_on_idle_options(name, method)
        cost = method.costs(config)
        if cost:
            lines.append(f"{name}: {cost}")
    return lines
