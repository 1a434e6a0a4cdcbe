"""Whether score files may be compared: what differs between them beside the model, and what is missing in one.

A score has, from `eval`: `fingerprint` (`fields` that were asked for, `resolved` as the engine had them, `versions`),
`rules`, and `coverage` (`answers` there are, `asked` for, `in_data`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Score = dict[str, Any]
# What a comparison is about, and what two samples may differ in.
_FREE = ("model", "model_hash", "revision", "seed")
_SHOWN = 60  # characters of a value


def cautions(scores: Sequence[tuple[str, Score]]) -> list[str]:
    """Lines for a person who compares scores, given with their names: nothing where they differ in the model alone."""
    lines = [f"warning: {name}: {line}" for name, score in scores if (line := missing_answers(score))]
    without = [name for name, score in scores if not _part(score, "fields")]
    if without:
        lines.append(
            f"warning: {', '.join(without)}: no fingerprint, so it is not known whether the prompt, the sampling and "
            "the data were the same"
        )
    with_fields = [(name, score) for name, score in scores if name not in without]
    fields = _differing(with_fields, "fields", _FREE)
    # `auto` and a limit that is not given are the model's own, which only the engine knows.
    resolved = _differing([pair for pair in with_fields if _part(pair[1], "resolved")], "resolved", tuple(fields))
    lines += [f"warning: the runs differ in {key}: {values}" for key, values in (fields | resolved).items()]
    rules = {json.dumps(score.get("rules") or {}, sort_keys=True) for _, score in scores}
    if len(rules) > 1:
        lines.append("warning: the runs were scored by different rules: " + " | ".join(sorted(rules)))
    versions = _differing(with_fields, "versions", ())
    return lines + [f"note: the runs differ in the version of {key}: {values}" for key, values in versions.items()]


def missing_answers(score: Score) -> str | None:
    """That a score is of a part of the answers that were asked for; None for a whole one, or where it is not known."""
    coverage = score.get("coverage") or {}
    answers, asked = coverage.get("answers"), coverage.get("asked")
    if not answers or not asked or answers >= asked:
        return None
    return f"the score of a part: {answers} of {asked} answers are there; run `infer` again for the others"


def _part(score: Score, name: str) -> dict[str, Any]:
    found = (score.get("fingerprint") or {}).get(name)
    return found if isinstance(found, dict) else {}


def _differing(scores: Sequence[tuple[str, Score]], part: str, without: Sequence[str]) -> dict[str, str]:
    """The keys of a part of the fingerprints in which the scores are not alike, with everybody's value."""
    parts = [(name, _part(score, part)) for name, score in scores]
    keys = [key for key in dict.fromkeys(key for _, found in parts for key in found) if key not in without]
    return {
        key: ", ".join(f"{name} {_shown(found.get(key))}" for name, found in parts)
        for key in keys
        if len({json.dumps(found.get(key), sort_keys=True) for _, found in parts}) > 1
    }


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"
