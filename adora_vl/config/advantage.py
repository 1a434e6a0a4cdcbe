"""The methods that compute the advantages: their options, and what they need from a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
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


# Functions and classes that Python code passed in place of a method's name, by that name.
_from_python: dict[str, Any] = {}


def name_functions(value: Any) -> Any:
    """Return the value of `adora_method` with names in place of functions.

    Python code may pass a function `(groups, advantages) -> advantages` or a subclass of `Method`,
    alone or as a key of the mapping. Raises `UserError` for one that has the name of a method here.
    """
    if callable(value):
        return {_registered(value): {}}
    if isinstance(value, Mapping):
        return {
            _registered(name) if callable(name) else name: options
            for name, options in value.items()
        }
    return value


def _registered(method: Any) -> str:
    """Keep a function or class of Python code under its name, which is returned."""
    name = function_name(method)
    if name in METHODS:
        raise UserError(
            f"adora_method: the function {name!r} has the name of a method that is here; rename it"
        )
    if inspect.isclass(method) and not issubclass(method, Method):
        raise UserError(f"adora_method: the class {name!r} is no subclass of adora_vl.Method")
    _from_python[name] = method
    return name


def requested_methods(value: str | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods in the value of `adora_method`, in order, with the options that are set.

    Raises `UserError` for an unknown method, and for options that are no mapping.
    """
    if isinstance(value, str):
        names = [name.strip() for name in value.split("+")]
        if len(set(names)) < len(names):
            raise UserError(f"adora_method: {value} names a method twice")
        value = dict.fromkeys(names)
    for name, options in value.items():
        unknown = not (name in METHODS or name in _from_python or is_own(str(name)))
        keys = KEYS_OF_TRL.get(str(name).lower())
        remedy = f"use one of {', '.join(METHODS)}{did_you_mean(str(name), METHODS)}"
        if unknown and keys:
            raise UserError(
                f"adora_method: {name} is in TRL's own keys; set {keys}, and adora_method: grpo "
                "or adora"
            )
        if unknown:
            raise UserError(f"adora_method: unknown method {name!r}, {remedy}")
        if options is not None and not isinstance(options, Mapping):
            raise UserError(
                f"adora_method.{own_name(str(name))}: {options!r:.60} is not a mapping of its "
                "options"
            )
    return {name: dict(options or {}) for name, options in value.items()}


def _from_file(name: str) -> FromFile:
    """Load a method of the user's, a function or a subclass of `Method`, from FILE.py:NAME."""

    def is_method(value: object) -> bool:
        return is_function(value) or (isinstance(value, type) and issubclass(value, Method))

    return from_file("adora_method", name, noun="method", fits=is_method)


def method_hashes(config: AdoraGRPOConfig) -> dict[str, str]:
    """A hash of each file that a method comes from, with its neighbours, and of Python's functions."""
    names = [*requested_methods(config.adora_method)]
    loaded = [_from_file(name) for name in names if is_own(name)]
    passed = {name: source_hash(_from_python[name]) for name in names if name in _from_python}
    return {**{method.file: method.hash for method in loaded}, **passed}


def settle_methods(config: AdoraGRPOConfig) -> list[str]:
    """Fill in all options in `adora_method`, and set the keys of TRL that the methods set.

    Returns a note for each key that changes. Raises `UserError`.
    """
    notes = []
    settled = {}
    for name, options in requested_methods(config.adora_method).items():
        keep = options.pop(KEEP, [])
        method = _build_method(name, options)
        keep = [keep] if isinstance(keep, str) else keep
        if not isinstance(keep, list) or not set(map(str, keep)) <= method.settings.keys():
            settable = ", ".join(method.settings) or "none"
            raise UserError(
                f"adora_method.{own_name(name)}.{KEEP}: {keep!r} must list keys that {name} sets: "
                f"{settable}"
            )
        for key, value in method.settings.items():
            before = getattr(config, key)
            if key not in keep and before != value:
                setattr(config, key, value)
                notes.append(
                    f"{name} sets {key}: {value} (was {before}; {KEEP}: [{key}] leaves it)"
                )
        all_options = options if isinstance(method, OwnFunction) else plain(method)
        settled[name] = {**all_options}
        if keep:
            settled[name][KEEP] = keep
    config.adora_method = settled
    return notes


def _build_method(name: str, options: dict[str, Any]) -> Method:
    """Build a method from its options. Raises `UserError` for one that it does not have."""
    key = f"adora_method.{own_name(name)}"
    kind = _kind_of(name)
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


def _kind_of(name: str) -> Any:
    """The class of a method, or the user's function."""
    if is_own(name):
        return _from_file(name).value
    return METHODS[name] if name in METHODS else _from_python[name]


def chosen_methods(config: AdoraGRPOConfig) -> dict[str, Method]:
    """Build the methods with their options, in order.

    Raises `UserError` for an unknown option or a wrong value, and for a method that computes
    advantages from the rewards but does not stand first, where it would discard the others' work.
    """
    requested = requested_methods(config.adora_method)
    chosen: dict[str, Method] = {}
    for name, options in requested.items():
        without_keep = {key: value for key, value in options.items() if key != KEEP}
        chosen[own_name(name)] = _build_method(name, without_keep)
    for name, method in list(chosen.items())[1:]:
        if method.remakes:
            raise UserError(
                f"adora_method: {'+'.join(requested)}: {name} starts from the rewards, so it must "
                "stand first"
            )
    return chosen


def method_run(config: AdoraGRPOConfig) -> AdvantagePipeline:
    """Build the pipeline of the run's methods, which has their state."""
    return AdvantagePipeline(
        chosen_methods(config),
        scale=str(config.scale_rewards),
        max_length=config.max_completion_length,
        sums_rewards=config.multi_objective_aggregation == "sum_then_normalize",
        seed=config.seed,
    )


def check_method(config: AdoraGRPOConfig) -> None:
    """Check that the other keys fit the methods, and try the methods of the user's.

    Raises `UserError`.
    """
    for name, method in chosen_methods(config).items():
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


def method_needs(config: AdoraGRPOConfig) -> list[str]:
    """The lines on what the methods set and what they cost beyond GRPO, for the run's start."""
    costs = {name: method.costs(config) for name, method in chosen_methods(config).items()}
    return [
        *getattr(config, "method_notes", []),
        *(f"{name}: {cost}" for name, cost in costs.items() if cost),
    ]
