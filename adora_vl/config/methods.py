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
from adora_vl.config.values import convert
from adora_vl.utils import own_files
from adora_vl.utils.cli import plain
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.own_files import (
    FromFile,
    from_file,
    function_name,
    is_function,
    is_own,
    own_name,
    source_hash,
)

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

# An entry beside a method's options: the keys of TRL that the method must not set.
KEEP = "keep_settings"

# Methods that TRL has under keys of its own.
KEYS_OF_TRL = {
    "gspo": "importance_sampling_level: sequence, epsilon: 3e-4, epsilon_high: 4e-4, loss_type: "
    "grpo, beta: 0.0",
    "lite_ppo": "scale_rewards: batch, loss_type: dapo",
    **{name: f"loss_type: {name}" for name in ("bnpo", "sapo", "vespo")},
    "cispo": "loss_type: cispo, epsilon_high: 5.0",
    "luspo": "loss_type: luspo, importance_sampling_level: sequence",
}


@dataclass(frozen=True)
class OwnFunction(Method):
    """A function of the user's, `(groups, advantages) -> advantages`, as a method."""

    function: Callable[[Groups, Tensor], Tensor]

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        """Call the user's function."""
        return self.function(groups, advantages_PG)


@dataclass(frozen=True, kw_only=True)
class ConfiguredMethod:
    """A method as a run's config names it.

    `entry`: its name in `adora_method`. `method`: itself, with its options. `options`: those
    options as the key has them. `keeps`: the keys of TRL that it leaves as they are.
    """

    entry: str
    method: Method
    options: Mapping[str, Any]
    keeps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MethodSet:
    """The methods of a run in their order, built once.

    `configured`: the methods. `hashes`: a hash of each file that one comes from, with its
    neighbours, and of each function of Python code. `notes`: a line for each key of TRL that a
    method has changed.
    """

    configured: tuple[ConfiguredMethod, ...]
    hashes: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> dict[str, Method]:
        """The methods by name, that of one from a file without the file."""
        return {own_name(entry.entry): entry.method for entry in self.configured}

    def options(self) -> dict[str, dict[str, Any]]:
        """Return the value of `adora_method` with all options of each method."""
        value: dict[str, dict[str, Any]] = {}
        for entry in self.configured:
            value[entry.entry] = {**entry.options}
            if entry.keeps:
                value[entry.entry][KEEP] = list(entry.keeps)
        return value


def name_functions(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the value of `adora_method` with names in place of functions, and these by name.

    Python code may pass a function `(groups, advantages) -> advantages` or a subclass of `Method`,
    alone or as a key of the mapping. Raises `UserError` for one that has the name of a method here.
    """
    if callable(value):
        return {_name_of(value): {}}, {_name_of(value): value}
    if not isinstance(value, Mapping):
        return value, {}
    functions = {_name_of(entry): entry for entry in value if callable(entry)}
    named = {
        _name_of(entry) if callable(entry) else entry: options for entry, options in value.items()
    }
    return named, functions


def _name_of(method: Any) -> str:
    """Return the name of a function or class that Python code passed as a method."""
    name = function_name(method)
    if name in METHODS:
        raise UserError(
            f"adora_method: the function {name!r} has the name of a method that is here; rename it"
        )
    if inspect.isclass(method) and not issubclass(method, Method):
        raise UserError(f"adora_method: the class {name!r} is no subclass of adora_vl.Method")
    return name


def build_methods(
    value: str | Mapping[str, Any], functions: Mapping[str, Any] | None = None
) -> MethodSet:
    """Build the methods that the value of `adora_method` names, in order.

    `functions`: those of Python code, by name. Raises `UserError` for an unknown method or option,
    for a wrong value, and for a method that computes advantages from the rewards but does not stand
    first, where it would discard the others' work.
    """
    configured: list[ConfiguredMethod] = []
    hashes: dict[str, str] = {}
    functions = functions or {}
    requested = _requested_methods(value, functions)
    for name, options in requested.items():
        keeps = options.pop(KEEP, [])
        if is_own(name):
            file = _from_file(name)
            hashes[file.file] = file.hash
            method = _build_method(name, file.value, options)
        elif name in functions:
            hashes[name] = source_hash(functions[name])
            method = _build_method(name, functions[name], options)
        else:
            method = _build_method(name, METHODS[name], options)
        configured.append(
            ConfiguredMethod(
                entry=name,
                method=method,
                options=options if isinstance(method, OwnFunction) else plain(method),
                keeps=_kept_keys(name, keeps, method),
            )
        )
    for entry in configured[1:]:
        if entry.method.remakes:
            raise UserError(
                f"adora_method: {'+'.join(requested)}: {own_name(entry.entry)} starts from the "
                "rewards, so it must stand first"
            )
    return MethodSet(configured=tuple(configured), hashes=hashes)


def settle_methods(config: AdoraGRPOConfig, functions: Mapping[str, Any]) -> MethodSet:
    """Build the methods, write all their options into `adora_method`, and set their keys of TRL.

    `functions`: those of Python code, by name. Returns the methods, with a note for each key that
    changes. Raises `UserError`.
    """
    methods = build_methods(config.adora_method, functions)
    notes: list[str] = []
    for entry in methods.configured:
        for key, value in entry.method.settings.items():
            before = getattr(config, key)
            if key in entry.keeps or before == value:
                continue
            setattr(config, key, value)
            notes.append(
                f"{entry.entry} sets {key}: {value} (was {before}; {KEEP}: [{key}] leaves it)"
            )
    config.adora_method = methods.options()
    return replace(methods, notes=tuple(notes))


def _requested_methods(
    value: str | Mapping[str, Any], functions: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the methods in the value of `adora_method`, in order, with the options that are set.

    Raises `UserError` for an unknown method, and for options that are no mapping.
    """
    if isinstance(value, str):
        names = [name.strip() for name in value.split("+")]
        if len(set(names)) < len(names):
            raise UserError(f"adora_method: {value} names a method twice")
        value = dict.fromkeys(names)
    for name, options in value.items():
        if not (name in METHODS or name in functions or is_own(str(name))):
            raise _unknown_method(str(name))
        if options is not None and not isinstance(options, Mapping):
            raise UserError(
                f"adora_method.{own_name(str(name))}: {options!r:.60} is not a mapping of its "
                "options"
            )
    return {name: dict(options or {}) for name, options in value.items()}


def _unknown_method(name: str) -> UserError:
    """Return the error for a name that is no method, with the keys of TRL that say the same."""
    keys = KEYS_OF_TRL.get(name.lower())
    if keys:
        return UserError(
            f"adora_method: {name} is in TRL's own keys; set {keys}, and adora_method: grpo or adora"
        )
    remedy = f"use one of {', '.join(METHODS)}{did_you_mean(name, METHODS)}"
    return UserError(f"adora_method: unknown method {name!r}, {remedy}")


def _from_file(name: str) -> FromFile:
    """Load a method of the user's, a function or a subclass of `Method`, from FILE.py:NAME."""

    def is_method(value: object) -> bool:
        return is_function(value) or (isinstance(value, type) and issubclass(value, Method))

    return from_file("adora_method", name, noun="method", fits=is_method)


def _kept_keys(name: str, keys: object, method: Method) -> tuple[str, ...]:
    """Return the keys of TRL that `keep_settings` lists.

    Raises `UserError` for one that the method does not set.
    """
    listed = [keys] if isinstance(keys, str) else keys
    if not isinstance(listed, list) or not set(map(str, listed)) <= method.settings.keys():
        settable = ", ".join(method.settings) or "none"
        raise UserError(
            f"adora_method.{own_name(name)}.{KEEP}: {listed!r} must list keys that {name} sets: "
            f"{settable}"
        )
    return tuple(listed)


def _build_method(
    name: str, kind: type[Method] | Callable[..., Tensor], options: dict[str, Any]
) -> Method:
    """Build a method from its class or function, and its options.

    Raises `UserError` for an option that it does not have, or a wrong value.
    """
    key = f"adora_method.{own_name(name)}"
    if isinstance(kind, type):
        method: Method = convert(key, options, kind)
        return method
    # The first two parameters are the groups and the advantages.
    parameters = [*inspect.signature(kind).parameters][2:]
    for option in options:
        if option not in parameters:
            raise UserError(
                f"{key}: unknown option {option!r}, it has {', '.join(parameters) or 'none'}"
                f"{did_you_mean(str(option), parameters)}"
            )
    return OwnFunction(partial(kind, **options) if options else kind)


def check_methods(config: AdoraGRPOConfig) -> None:
    """Check that the other keys fit the methods, and try the methods of the user's.

    Raises `UserError`.
    """
    if config.adora_method != config.methods.options():
        raise UserError(
            "adora_method: it was set after the config was made, when its methods are built; give "
            "it to AdoraGRPOConfig(adora_method=...)"
        )
    for name, method in config.methods.chosen.items():
        if method.remakes and config.multi_objective_aggregation != "sum_then_normalize":
            raise UserError(
                f"adora_method: {name} needs multi_objective_aggregation: sum_then_normalize, one "
                "reward each"
            )
        try:
            method.check(config)
        except ValueError as error:
            # The text of the error begins with the name of an option, or with a key.
            subject = str(error).partition(":")[0]
            is_option = subject in {option.name for option in fields(method)}
            prefix = f"adora_method.{name}." if is_option else ""
            raise UserError(f"{prefix}{error}") from error
        if name not in METHODS:
            _try(name, method, config)


def _try(name: str, method: Method, config: AdoraGRPOConfig) -> None:
    """Call the user's method with two groups, of which one has no signal.

    Raises `UserError` where it fails, or returns something else than finite advantages.
    """
    rewards_PG = torch.zeros(2, config.num_generations)
    rewards_PG[0, 0] = 1.0
    lengths_PG = torch.full_like(rewards_PG, config.max_completion_length)
    groups = Groups(
        rewards_PG=rewards_PG,
        lengths_PG=lengths_PG,
        truncated_PG=lengths_PG < 0,
        surprisal_PG=lengths_PG,
    )
    run = AdvantagePipeline({name: method})
    advantages_PG = group_advantages(rewards_PG)
    try:
        with own_files.deadline(own_files.LOAD_TIMEOUT_S):
            # the clone keeps the advantages whole if the method changes them in place
            result = method.apply(groups, advantages_PG.clone(), run)
            is_valid = (
                isinstance(result, Tensor)
                and result.shape == advantages_PG.shape
                and bool(result.isfinite().all())
            )
    except (Exception, own_files.OverdueError) as error:
        raise UserError(
            f"adora_method: {name}, tried before the run: {in_one_line(error)}"
        ) from error
    if not is_valid:
        raise UserError(
            f"adora_method: {name}, tried before the run: it returned {result!s:.60}, not finite "
            f"advantages of shape {tuple(advantages_PG.shape)}"
        )


def build_pipeline(config: AdoraGRPOConfig) -> AdvantagePipeline:
    """Build the pipeline of the run's methods, which has their state."""
    return AdvantagePipeline(
        config.methods.chosen,
        scale=str(config.scale_rewards),
        max_length=config.max_completion_length,
        sums_rewards=config.multi_objective_aggregation == "sum_then_normalize",
        seed=config.seed,
    )


def method_overheads(config: AdoraGRPOConfig) -> list[str]:
    """Return what the methods set and cost beyond GRPO, as lines for the start of the run."""
    costs = {name: method.costs(config) for name, method in config.methods.chosen.items()}
    return [
        *config.methods.notes,
        *(f"{name}: {cost}" for name, cost in costs.items() if cost),
    ]
