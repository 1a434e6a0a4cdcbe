"""The flow of a dry run."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from adora_vl.config.command_line import given_keys
from adora_vl.dry_run.lengths import quantile
from adora_vl.dry_run.options import DryRunOptions, take_options
from adora_vl.dry_run.plan_text import changed_keys, default_of, report, steps_of
from adora_vl.dry_run.planning import Plan, make_plan
from adora_vl.dry_run.schedule import learning_rates, schedule_name
from adora_vl.errors import UserError
from adora_vl.files import check_folder, check_json, replace_file, written_to
from adora_vl.memory.predict import fits, largest_batch, largest_image_tokens, predict
from adora_vl.rollout.environment import prepare_engine_environment


def dry_run(arguments: Sequence[str]) -> int:
    """Print what the command would do. Returns 0 if it fits, 1 if not; raises `UserError` as a run would."""
    options, rest = take_options(arguments)
    _check_outputs(options)
    prepare_engine_environment()
    plan = make_plan(rest, options)
    if os.environ.get("RANK", "0") != "0":  # one of several processes speaks
        return 0
    given = given_keys(rest)
    print(report(plan, given), flush=True)
    if options.write_config is not None:
        _write("--write-config", options.write_config, yaml.safe_dump(resolved(plan, given), sort_keys=False))
    if options.json is not None:
        _write("--json", options.json, json.dumps(figures(plan, given), indent=2, default=str) + "\n")
    return 0 if fits(plan.setup, plan.card) else 1


def _check_outputs(options: DryRunOptions) -> None:
    if options.json is not None:
        check_json("--json", options.json, "the figures of a dry run", lambda figures: "peak_bytes" in figures)
    config = options.write_config
    if config is not None:
        check_folder("--write-config", config.parent)
        if config.is_file() or config.is_dir():
            raise UserError(f"--write-config: {str(config)!r} is there already; choose another name")


def _write(option: str, path: Path, text: str) -> None:
    with written_to(option, path):
        replace_file(path, text)


def resolved(plan: Plan, given: Collection[str]) -> dict[str, Any]:
    """Every key with its value, in a form that `--config` reads; what differs from the defaults comes first.

    Left out is what Transformers or TRL derive from the other keys and would not take back.
    """
    changed = changed_keys(plan, given)
    everything = dict(changed)
    for dataclass in (plan.script, plan.config, plan.model):
        for field in fields(dataclass):
            value = getattr(dataclass, field.name)
            if field.init and field.name not in everything and value == default_of(field):
                everything[field.name] = getattr(value, "value", value)
    return {key: value for key, value in everything.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return False
    return value is not None  # a key that is not set has no line


def figures(plan: Plan, given: Collection[str]) -> dict[str, Any]:
    """The same as the report, for a program."""
    prediction = predict(plan.setup, plan.card)
    epoch, total = steps_of(plan)
    return {
        "changed": changed_keys(plan, given),
        "batches": asdict(plan.batches),
        "updates": {"a_generation": plan.batches.updates_per_generation, "an_epoch": epoch, "total": total},
        "learning_rate": {"schedule": schedule_name(plan.config), **(learning_rates(plan.config, total) or {})},
        "rows": plan.lengths.rows,
        "prompt_tokens": _spread(plan.lengths.prompt),
        "image_tokens": _spread(plan.lengths.image),
        "card_bytes": plan.card,
        "phases": prediction.phases,
        "peak_bytes": prediction.peak,
        "fits": fits(plan.setup, plan.card),
        "largest_per_device_train_batch_size": largest_batch(plan.setup, plan.card),
        "largest_max_pixels": largest_image_tokens(plan.setup, plan.card) * plan.setup.shape.image_token_pixels,
        "notes": plan.notes,
    }


def _spread(values: Sequence[int]) -> dict[str, int]:
    return {
        "min": min(values), "median": quantile(values, 0.5), "p95": quantile(values, 0.95), "max": max(values)
    }  # fmt: skip
