"""Which methods compute the advantages: their options, and what they need from a run."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from adora_vl.advantage import METHODS, AdvantagePipeline, Groups, Method, Schedule, group_advantages
from adora_vl.advantage.adora import Adora
from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.own_files import (
    LOAD_TIMEOUT_S,
    FromFile,
    OverdueError,
    deadline,
    from_file,
    is_function,
    is_own,
    own_name,
)

KEEP = "keep_settings"  # in the block of options: the keys of TRL that the method must not set


@dataclass(frozen=True)
class OwnFunction(Method):
    """A function of the user's, `(groups, advantages) -> advantages`, as a method."""

    function: Callable[[Groups, Tensor], Tensor]

    def apply(self, groups: Groups, advantages_PG: Tensor, run: AdvantagePipeline) -> Tensor:
        return self.function(groups, advantages_PG)


def _is_method(value: object) -> bool:
    return is_function(value) or (isinstance(value, type) and issubclass(value, Method))


def method_names(config: Any) -> list[str]:
    """The names in `adora_method`, in order: methods of ours, and FILE.py:NAME. Raises `UserError` for an unknown one,
    naming the nearest.
    """
    names = [name.strip() for name in str(config.adora_method).split("+")]
    for name in names:
        if name not in METHODS and not is_own(name):
            raise UserError(
                f"adora_method: unknown method {name!r}, use one of {', '.join(METHODS)}{did_you_mean(name, METHODS)}"
            )
    if len(set(names)) < len(names):
        raise UserError(f"adora_method: {config.adora_method} names a method twice")
    return names


def _from_file(name: str) -> FromFile:
    return from_file("adora_method", name, noun="method", fits=_is_method)


def _kind(name: str) -> Any:
    """The class of a method, or the user's function."""
    return _from_file(name).value if is_own(name) else METHODS[name]


def method_hashes(config: Any) -> dict[str, str]:
    """A hash of each file that a method comes from, with its neighbours."""
    found = [_from_file(name) for name in method_names(config) if is_own(name)]
    return {one.file: one.hash for one in found}


def _block(config: Any) -> dict[str, Any]:
    """The mapping in `adora_method_options`, which is JSON on the command line and was checked there."""
    block = config.adora_method_options
    return dict(read_json(block) if isinstance(block, str) else block or {})


def set_method_settings(config: Any) -> list[str]:
    """Set the keys of TRL that belong to the method. Returns one note per key that changed. Raises `UserError`."""
    names, keep = method_names(config), _block(config).get(KEEP, [])
    settings = {key: (value, name) for name in names for key, value in getattr(_kind(name), "settings", {}).items()}
    if not isinstance(keep, list) or not set(map(str, keep)) <= settings.keys():
        able = ", ".join(settings) or "none"
        raise UserError(
            f"adora_method_options: {KEEP}: {keep!r} must list keys that {config.adora_method} sets: {able}"
        )
    notes = []
    for key, (value, name) in settings.items():
        before = getattr(config, key)
        if key not in keep and before != value:
            setattr(config, key, value)
            notes.append(f"{name} sets {key}: {value} (was {before}; {KEEP}: [{key}] leaves it)")
    return notes


def _schedule(key: str, value: Any) -> Schedule:
    if not isinstance(value, Mapping):
        return Schedule(_convert(key, value, float))
    types_of = get_type_hints(Schedule)
    for name in value:
        if name not in types_of:
            raise UserError(f"adora_method_options: {key}: unknown '{name}'{did_you_mean(str(name), types_of)}")
    try:
        return Schedule(**{name: _convert(f"{key}: {name}", item, types_of[name]) for name, item in value.items()})
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"adora_method_options: {key}: {error}") from error


def _convert(key: str, value: Any, wanted: Any) -> Any:
    """`value` as the type that the option declares. Raises `UserError`."""
    if wanted is Schedule:
        return _schedule(key, value)
    if get_origin(wanted) in (Union, types.UnionType):
        if value is None:
            return None
        return _convert(key, value, next(arm for arm in get_args(wanted) if arm is not type(None)))
    if get_origin(wanted) is tuple:
        inner = get_args(wanted)
        fits = isinstance(value, (list, tuple)) and (inner[-1] is ... or len(value) == len(inner))
        if not fits:
            count = "" if inner[-1] is ... else f" of {len(inner)}"
            raise UserError(f"adora_method_options: {key}: {value!r} must be a list{count}")
        return tuple(_convert(key, item, inner[0]) for item in value)
    if wanted is float and type(value) in (int, float):
        return float(value)
    if type(value) is wanted:
        return value
    kind = {float: "a number", int: "a whole number", bool: "true or false", str: "a word"}[wanted]
    raise UserError(f"adora_method_options: {key}: {value!r} is not {kind}")


def _from_keys(config: Any) -> dict[str, Any]:
    """ADORA's options as the `adora_*` keys give them."""
    return {
        "mode": config.adora_mode,
        "factor": Schedule(config.adora_factor),
        "criteria": tuple(config.adora_criteria),
        "combine": config.adora_combine,
        "tau": Schedule(config.adora_tau),
        "empty_wrong": config.adora_empty_wrong,
        "ties": config.adora_ties,
        "no_correct": config.adora_no_correct,
        "difficulty_needs_correct": config.adora_difficulty_needs_correct,
    }


def chosen_methods(config: Any) -> dict[str, Method]:
    """The methods with their options, in order. Raises `UserError` for an unknown option or a wrong value."""
    names, block = method_names(config), _block(config)
    block.pop(KEEP, None)
    kinds = {name: _kind(name) for name in names}
    owners = {option: name for name in names for option in _options_of(kinds[name])}
    for key in block:
        if key not in owners:
            known = ", ".join(owners) or "none"
            raise UserError(
                f"adora_method_options: unknown option '{key}' of {config.adora_method}, it has {known}"
                f"{did_you_mean(str(key), owners)}"
            )
    chosen: dict[str, Method] = {}
    for name, kind in kinds.items():
        given = {key: value for key, value in block.items() if owners[key] == name}
        if not isinstance(kind, type):
            chosen[own_name(name)] = OwnFunction(partial(kind, **given) if given else kind)
            continue
        types_of = get_type_hints(kind)
        given = {key: _convert(key, value, types_of[key]) for key, value in given.items()}
        try:
            chosen[own_name(name)] = kind(**{**(_from_keys(config) if name == "adora" else {}), **given})
        except ValueError as error:  # its text begins with the option, which for ADORA may be a key of the config
            is_key = name == "adora" and str(error).partition(":")[0] not in given
            raise UserError(f"{'adora_' if is_key else 'adora_method_options: '}{error}") from error
    for name, method in list(chosen.items())[1:]:
        if method.remakes:
            raise UserError(
                f"adora_method: {config.adora_method}: {name} starts from the rewards, so it must stand first"
            )
    return chosen


def _options_of(kind: Any) -> list[str]:
    """The names of a method's options: fields of its class, or what a function takes beside groups and advantages."""
    return [each.name for each in fields(kind)] if isinstance(kind, type) else [*inspect.signature(kind).parameters][2:]


def method_run(config: Any) -> AdvantagePipeline:
    """The run's methods with their state."""
    return AdvantagePipeline(
        chosen_methods(config),
        judged_by=Adora(**{**_from_keys(config), "mode": "off"}),
        scale=str(config.scale_rewards),
        max_length=config.max_completion_length,
        sums_rewards=config.multi_objective_aggregation == "sum_then_normalize",
        seed=config.seed,
    )


def check_method(config: Any) -> None:
    """Check that the other keys fit the methods, and try those of the user's. Raises `UserError`."""
    for name, method in chosen_methods(config).items():
        if method.remakes and config.multi_objective_aggregation != "sum_then_normalize":
            raise UserError(
                f"adora_method: {name} needs multi_objective_aggregation: sum_then_normalize, one reward each"
            )
        try:
            method.check(config)
        except ValueError as error:  # its text begins with a key, or with an option
            of_option = str(error).partition(":")[0] in {each.name for each in fields(method)}
            raise UserError(f"{'adora_method_options: ' if of_option else ''}{error}") from error
        if name not in METHODS:
            _try(name, method, config)


def _try(name: str, method: Method, config: Any) -> None:
    """Two groups as they come, one of them without signal. Raises `UserError` where the user's method fails."""
    rewards_PG = torch.zeros(2, config.num_generations)
    rewards_PG[0, 0] = 1.0
    lengths_PG = torch.full_like(rewards_PG, config.max_completion_length)
    groups = Groups(rewards_PG, lengths_PG, lengths_PG < 0, surprisal_PG=lengths_PG)
    run, given_PG = AdvantagePipeline({name: method}), group_advantages(rewards_PG)
    try:
        with deadline(LOAD_TIMEOUT_S):
            made = method.apply(groups, given_PG.clone(), run)
            fits = isinstance(made, Tensor) and made.shape == given_PG.shape and bool(made.isfinite().all())
    except (Exception, OverdueError) as error:
        raise UserError(f"adora_method: {name}, tried before the run: {in_one_line(error)}") from error
    if not fits:
        raise UserError(
            f"adora_method: {name}, tried before the run: it returned {made!s:.60}, not finite advantages of shape "
            f"{tuple(given_PG.shape)}"
        )


def method_needs(config: Any) -> list[str]:
    """What the methods cost beyond GRPO, one line each, for the first lines of the run."""
    costs = {name: method.costs(config) for name, method in chosen_methods(config).items()}
    return [*getattr(config, "method_notes", []), *(f"{name}: {cost}" for name, cost in costs.items() if cost)]
