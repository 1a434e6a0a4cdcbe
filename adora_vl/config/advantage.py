"""Which methods compute the advantages: their options, and what they need from a run."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adora_vl.advantage import METHODS, AdvantagePipeline, Groups, Method, group_advantages
from adora_vl.config.values import convert
from adora_vl.utils import own_files
from adora_vl.utils.cli import plain
from adora_vl.utils.errors import UserError, did_you_mean, in_one_line
from adora_vl.utils.own_files import FromFile, from_file, is_function, is_own, own_name

KEEP = "keep_settings"  # beside a method's options: the keys of TRL that it must not set

# What TRL has under other keys than a method's name.
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
        return self.function(groups, advantages_PG)


def asked_methods(value: Any) -> dict[str, dict[str, Any]]:
    """The methods in `adora_method`, in order, with the options given.

    Raises `UserError` for an unknown one.
    """
    if isinstance(value, str):
        names = [name.strip() for name in value.split("+")]
        if len(set(names)) < len(names):
            raise UserError(f"adora_method: {value} names a method twice")
        value = dict.fromkeys(names)
    for name, options in value.items():
        unknown = name not in METHODS and not is_own(str(name))
        keys = KEYS_OF_TRL.get(str(name).lower())
        meant = f"use one of {', '.join(METHODS)}{did_you_mean(str(name), METHODS)}"
        if unknown and keys:
            raise UserError(
                f"adora_method: {name} is in TRL's own keys; set {keys}, and adora_method: grpo "
                "or adora"
            )
        if unknown:
            raise UserError(f"adora_method: unknown method {name!r}, {meant}")
        if options is not None and not isinstance(options, Mapping):
            raise UserError(
                f"adora_method.{own_name(str(name))}: {options!r:.60} is not a mapping of its "
                "options"
            )
    return {name: dict(options or {}) for name, options in value.items()}


def _from_file(name: str) -> FromFile:
    def is_method(value: object) -> bool:
        return is_function(value) or (isinstance(value, type) and issubclass(value, Method))

    return from_file("adora_method", name, noun="method", fits=is_method)


def method_hashes(config: Any) -> dict[str, str]:
    """A hash of each file that a method comes from, with its neighbours."""
    found = [_from_file(name) for name in asked_methods(config.adora_method) if is_own(name)]
    return {one.file: one.hash for one in found}


def settle_methods(config: Any) -> list[str]:
    """Settle `adora_method` with all options, and the keys of TRL it sets, with a note on each.

    Raises `UserError`.
    """
    notes = []
    settled = {}
    for name, given in asked_methods(config.adora_method).items():
        keep = given.pop(KEEP, [])
        method = _made(name, given)
        keep = [keep] if isinstance(keep, str) else keep
        if not isinstance(keep, list) or not set(map(str, keep)) <= method.settings.keys():
            able = ", ".join(method.settings) or "none"
            raise UserError(
                f"adora_method.{own_name(name)}.{KEEP}: {keep!r} must list keys that {name} sets: "
                f"{able}"
            )
        for key, value in method.settings.items():
            before = getattr(config, key)
            if key not in keep and before != value:
                setattr(config, key, value)
                notes.append(
                    f"{name} sets {key}: {value} (was {before}; {KEEP}: [{key}] leaves it)"
                )
        options = given if isinstance(method, OwnFunction) else plain(method)
        settled[name] = {**options, **({KEEP: keep} if keep else {})}
    config.adora_method = settled
    return notes


def _made(name: str, options: dict[str, Any]) -> Method:
    key = f"adora_method.{own_name(name)}"
    kind = _from_file(name).value if is_own(name) else METHODS[name]
    if isinstance(kind, type):
        made: Method = convert(key, options, kind)
        return made
    known = [*inspect.signature(kind).parameters][2:]
    for option in options:
        if option not in known:
            raise UserError(
                f"{key}: unknown option {option!r}, it has {', '.join(known) or 'none'}"
                f"{did_you_mean(str(option), known)}"
            )
    return OwnFunction(partial(kind, **options) if options else kind)


def chosen_methods(config: Any) -> dict[str, Method]:
    """The methods with their options, in order.

    Raises `UserError` for an unknown option or a wrong value.
    """
    asked = asked_methods(config.adora_method)
    chosen = {
        own_name(name): _made(name, {key: value for key, value in options.items() if key != KEEP})
        for name, options in asked.items()
    }
    for name, method in list(chosen.items())[1:]:
        if method.remakes:
            raise UserError(
                f"adora_method: {'+'.join(asked)}: {name} starts from the rewards, so it must "
                "stand first"
            )
    return chosen


def method_run(config: Any) -> AdvantagePipeline:
    """The run's methods with their state."""
    return AdvantagePipeline(
        chosen_methods(config),
        scale=str(config.scale_rewards),
        max_length=config.max_completion_length,
        sums_rewards=config.multi_objective_aggregation == "sum_then_normalize",
        seed=config.seed,
    )


def check_method(config: Any) -> None:
    """Check that the other keys fit the methods, and try those of the user's.

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
        except ValueError as error:  # its text begins with a key, or with an option
            of_option = str(error).partition(":")[0] in {each.name for each in fields(method)}
            raise UserError(f"{f'adora_method.{name}.' if of_option else ''}{error}") from error
        if name not in METHODS:
            _try(name, method, config)


def _try(name: str, method: Method, config: Any) -> None:
    """Two groups as they come, one of them without signal.

    Raises `UserError` where the user's method fails.
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
    given_PG = group_advantages(rewards_PG)
    try:
        with own_files.deadline(own_files.LOAD_TIMEOUT_S):
            made = method.apply(groups, given_PG.clone(), run)
            fits = (
                isinstance(made, Tensor)
                and made.shape == given_PG.shape
                and bool(made.isfinite().all())
            )
    except (Exception, own_files.OverdueError) as error:
        raise UserError(
            f"adora_method: {name}, tried before the run: {in_one_line(error)}"
        ) from error
    shape = f"finite advantages of shape {tuple(given_PG.shape)}"
    if not fits:
        raise UserError(
            f"adora_method: {name}, tried before the run: it returned {made!s:.60}, not {shape}"
        )


def method_needs(config: Any) -> list[str]:
    """What the methods cost beyond GRPO, one line each, for the first lines of the run."""
    costs = {name: method.costs(config) for name, method in chosen_methods(config).items()}
    return [
        *getattr(config, "method_notes", []),
        *(f"{name}: {cost}" for name, cost in costs.items() if cost),
    ]
