"""Which method computes the advantages: its block of options, and what it needs from a run."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from adora_vl.advantage import METHODS, AdvantagePipeline, Schedule
from adora_vl.advantage.adora import AdoraOptions
from adora_vl.utils.cli import read_json
from adora_vl.utils.errors import UserError, did_you_mean

KEEP = "keep_settings"  # in the block of options: the keys of TRL that the method must not set


def method_names(config: Any) -> list[str]:
    """The names in `adora_method`, in order. Raises `UserError` for an unknown one, naming the nearest."""
    names = [name.strip() for name in str(config.adora_method).split("+")]
    for name in names:
        if name not in METHODS:
            raise UserError(
                f"adora_method: unknown method {name!r}, use one of {', '.join(METHODS)}{did_you_mean(name, METHODS)}"
            )
    if len(set(names)) < len(names):
        raise UserError(f"adora_method: {config.adora_method} names a method twice")
    for name in names[1:]:
        if METHODS[name].remakes:
            raise UserError(
                f"adora_method: {config.adora_method}: {name} starts from the rewards, so it must stand first"
            )
    return names


def _block(config: Any) -> dict[str, Any]:
    """The mapping in `adora_method_options`, which is JSON on the command line and was checked there."""
    block = config.adora_method_options
    return dict(read_json(block) if isinstance(block, str) else block or {})


def set_method_settings(config: Any) -> list[str]:
    """Set the keys of TRL that belong to the method. Returns one note per key that changed. Raises `UserError`."""
    names, keep = method_names(config), _block(config).get(KEEP, [])
    settings = {key: (value, name) for name in names for key, value in METHODS[name].settings.items()}
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


def chosen_methods(config: Any) -> dict[str, Any]:
    """The options of each method, in order. Raises `UserError` for an unknown option or a wrong value."""
    names, block = method_names(config), _block(config)
    block.pop(KEEP, None)
    owners = {each.name: name for name in names for each in fields(METHODS[name].options)}
    for key in block:
        if key not in owners:
            known = ", ".join(owners) or "none"
            raise UserError(
                f"adora_method_options: unknown option '{key}' of {config.adora_method}, it has {known}"
                f"{did_you_mean(str(key), owners)}"
            )
    chosen: dict[str, Any] = {}
    for name in names:
        options = METHODS[name].options
        types_of = get_type_hints(options)
        given = {key: _convert(key, value, types_of[key]) for key, value in block.items() if owners[key] == name}
        try:
            chosen[name] = options(**{**(_from_keys(config) if name == "adora" else {}), **given})
        except ValueError as error:  # its text begins with the option, which for ADORA may be a key of the config
            is_key = name == "adora" and str(error).partition(":")[0] not in given
            raise UserError(f"{'adora_' if is_key else 'adora_method_options: '}{error}") from error
    return chosen


def method_run(config: Any) -> AdvantagePipeline:
    """The run's methods with their state."""
    return AdvantagePipeline(
        chosen_methods(config),
        judged_by=AdoraOptions(**{**_from_keys(config), "mode": "off"}),
        scale=str(config.scale_rewards),
        max_length=config.max_completion_length,
        sums_rewards=config.multi_objective_aggregation == "sum_then_normalize",
        seed=config.seed,
    )


def check_method(config: Any) -> None:
    """Check that the other keys fit the method. Raises `UserError`."""
    chosen = chosen_methods(config)
    for name in chosen:
        if METHODS[name].remakes and config.multi_objective_aggregation != "sum_then_normalize":
            raise UserError(
                f"adora_method: {name} needs multi_objective_aggregation: sum_then_normalize, one reward each"
            )
    if "mc_grpo" in chosen and config.num_generations % 2 == 0:
        count = config.num_generations
        raise UserError(
            f"num_generations: {count} is even; adora_method: mc_grpo samples one more, the median: {count + 1}"
        )
    canon = chosen.get("canon")
    if canon is not None and canon.measure == "entropy" and not config.use_vllm:
        raise UserError("adora_method: canon with measure: entropy needs use_vllm: true, else set measure: length")
    _check_assignment(config, chosen.get("adora"))
    daro = chosen.get("daro")
    if daro is not None and daro.by_bin_tokens and config.loss_type != "dapo":
        raise UserError(
            f"loss_type: {config.loss_type} with adora_method: daro, whose normalisation by bin needs loss_type: dapo"
        )
    dapo = chosen.get("dapo")
    if dapo is not None and dapo.overlong_cache is not None:
        if not 0 < dapo.overlong_cache <= config.max_completion_length:
            raise UserError(
                f"adora_method_options: overlong_cache: {dapo.overlong_cache} must be above 0 and at most "
                f"max_completion_length: {config.max_completion_length}"
            )
        if next(iter(chosen)) != "dapo" or config.multi_objective_aggregation != "sum_then_normalize":
            raise UserError(
                "adora_method_options: overlong_cache changes rewards: dapo must stand first in adora_method, and "
                "multi_objective_aggregation be sum_then_normalize"
            )


def _check_assignment(config: Any, adora: AdoraOptions | None) -> None:
    if adora is None or adora.assign != "rate":
        return
    if config.adora_replay_groups:
        raise UserError(
            f"adora_replay_groups: {config.adora_replay_groups} with assign: rate, which would learn from earlier "
            "groups at the rate of the present ones; set adora_replay_groups: 0"
        )
    if config.steps_per_generation * config.num_iterations % config.gradient_accumulation_steps:
        raise UserError(
            f"steps_per_generation: {config.steps_per_generation} with assign: rate, which needs optimizer steps of "
            "one generation each; make steps_per_generation x num_iterations a multiple of "
            f"gradient_accumulation_steps: {config.gradient_accumulation_steps}"
        )
    if config.deepspeed is not None or getattr(config, "deepspeed_plugin", None) is not None:
        raise UserError(
            "adora_method_options: assign: rate does not work with DeepSpeed, which takes its optimizer step before "
            "its learning rate can be scaled; train without DeepSpeed"
        )


def method_needs(config: Any) -> list[str]:
    """What the methods cost beyond GRPO, one line each, for the first lines of the run."""
    needs = {
        "mc_grpo": f"mc_grpo: of {config.num_generations} rollouts per prompt, the median is not learned from",
        "daro": f"daro: {config.num_generations - 1} learned weights, saved in every checkpoint",
        "canon": "canon: vLLM returns the log-probabilities of the rollouts" if config.use_vllm else "",
        "dapo": "dapo: groups without signal are dropped and not replaced",
        "d3s": "d3s: rollouts that are not chosen are still sampled and graded",
    }
    lines = [needs[name] for name in method_names(config) if needs.get(name)]
    return [*getattr(config, "method_notes", []), *lines]
