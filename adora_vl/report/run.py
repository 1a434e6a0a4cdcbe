"""A run as the viewer shows it, read from its `output_dir`: curves, and groups of rollouts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from adora_vl.errors import UserError
from adora_vl.report.manifest import facts_of_run, read_manifest
from adora_vl.report.weight_reason import weight_reason
from adora_vl.rollout_log.metrics_file import METRICS, read_metrics
from adora_vl.rollout_log.parts import IMAGES, ROLLOUTS, Part, parts, read_parts
from adora_vl.rollout_log.rollouts import SETTINGS

# One rollout is a list in this order; viewer/groups.js reads it by the same names. The completion is last, because the
# page keeps completions in a separate block.
ROLLOUT = (
    "verdict", "extracted", "reason", "reward", "advantage_raw", "advantage", "length", "truncated", "drift", "parts",
    "completion",
)  # fmt: skip
_GROUP = ("step", "id", "weight", "tds", "pass_rate", "longest_right", "mean_wrong")
_SHOWN_CHARACTERS = 12_000  # per text
Json = dict[str, Any]


@dataclass
class RunView:
    """What the page needs to know about one run. Everything in it can be written as JSON."""

    name: str
    metrics: list[Json]
    groups: list[Json] = field(default_factory=list)
    problems: dict[str, Json] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def images(self) -> list[str]:
        """The names of all diagrams, in the order in which the groups show them."""
        return list(dict.fromkeys(name for problem in self.problems.values() for name in problem["images"]))


def load_run(folder: Path, max_rollouts: int) -> RunView:
    """Read a run, also one that is still training. Raises `UserError` if the folder is no run, or cannot be read."""
    try:
        try:
            return _load(folder, max_rollouts)
        except FileNotFoundError:  # the run has merged or deleted a file since it was listed
            return _load(folder, max_rollouts)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"RUN: the record in {str(folder / ROLLOUTS)!r} cannot be read ({error})") from error


def _load(folder: Path, max_rollouts: int) -> RunView:
    metrics, found = read_metrics(folder / METRICS), parts(folder / ROLLOUTS)
    if not metrics and not found:
        missing = "is no folder" if not folder.is_dir() else f"has neither {METRICS} nor {ROLLOUTS}/"
        raise UserError(f"RUN: {str(folder)!r} {missing}; name the output_dir of a training run")
    view = RunView(folder.resolve().name, metrics, facts=facts_of_run(read_manifest(folder)))
    if found:
        _add_groups(view, found, max_rollouts)
    else:
        view.notes.append("No rollouts were recorded.")
    return view


def _add_groups(view: RunView, found: list[Part], max_rollouts: int) -> None:
    steps, total = _chosen_steps(found, max_rollouts)
    for part in found:
        wanted = [step for step in steps if part.first <= step <= part.last]
        if not wanted:
            continue
        table = read_parts([part]).filter(pc.field("step").isin(wanted))
        settings = json.loads((table.schema.metadata or {}).get(SETTINGS, b"{}"))
        for rows in _grouped(table):
            view.groups.append(_group(rows, settings, view.problems))
    shown = sum(len(group["rollouts"]) for group in view.groups)
    if shown < total:
        view.notes.append(f"{shown:,} of {total:,} recorded rollouts are shown, those of {len(steps)} steps.")


def _chosen_steps(found: list[Part], max_rollouts: int) -> tuple[list[int], int]:
    """Evenly spread steps with at most `max_rollouts` together (one step at least), and how many rollouts there are."""
    counts: dict[int, int] = {}
    for part in found:
        for entry in pc.value_counts(pq.read_table(part.path, columns=["step"])["step"]).to_pylist():
            counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
    steps, total = sorted(counts), sum(counts.values())
    keep = max(1, min(len(steps), int(len(steps) * max_rollouts / total)))
    chosen = [steps[round(i * (len(steps) - 1) / max(1, keep - 1))] for i in range(keep)]
    return sorted(set(chosen)), total


def _grouped(table: pa.Table) -> Iterator[list[Json]]:
    """The rows, group by group. In the record the rows of a group follow one another."""
    group: list[Json] = []
    for row in table.to_pylist():
        if group and (row["step"], row["group"]) != (group[0]["step"], group[0]["group"]):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _group(rows: list[Json], settings: Json, problems: dict[str, Json]) -> Json:
    first = rows[0]
    row_id = str(first["id"])
    problems.setdefault(
        row_id,
        {"problem": _cut(first["problem"]), "answer": _cut(first["answer"]), "images": first["images"] or []},
    )
    group = {name: first[name] for name in _GROUP} | {"id": row_id}
    group["equal"] = len({row["reward"] for row in rows}) == 1
    return {
        **{name: _rounded(value) for name, value in group.items()},
        "why": weight_reason(group, settings),
        "rollouts": [_rollout(row) for row in rows],
    }


def _rollout(row: Json) -> list[Any]:
    reward_parts = {name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")}
    values = {
        **row,
        "completion": _cut(row["completion"]),
        "extracted": _cut(row["extracted"]),
        "parts": {name: _rounded(value) for name, value in reward_parts.items()} if len(reward_parts) > 1 else None,
    }
    return [_rounded(values[name]) for name in ROLLOUT]


def _rounded(value: Any) -> Any:
    """Six digits are more than anybody reads, and half of what a float takes."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _cut(text: str | None) -> str | None:
    if text is None or len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}… ({len(text) - _SHOWN_CHARACTERS:,} more characters)"


def image_uris(folders: list[Path], views: list[RunView], max_bytes: int) -> tuple[dict[str, str], int]:
    """The diagrams as data URIs by name, up to `max_bytes` in total, and the number of those left out."""
    uris: dict[str, str] = {}
    used = left_out = 0
    for folder, view in zip(folders, views, strict=True):
        for name in view.images:
            path = folder / ROLLOUTS / IMAGES / Path(name).name
            if name in uris or not path.is_file():
                continue
            used += path.stat().st_size
            if used > max_bytes:
                left_out += 1
            else:
                uris[name] = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return uris, left_out
