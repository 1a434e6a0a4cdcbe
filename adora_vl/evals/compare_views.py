"""Runs of one model with other views or tools: whether it sees, reasons, and gains by tools."""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean

from adora_vl.evals.inference.views import VIEWS
from adora_vl.evals.score_differences import (
    common_problems,
    paired_difference,
    paired_test,
    solves_more,
)
from adora_vl.evals.score_files import ScoreFile, fingerprint_part
from adora_vl.evals.scoring.score import mean_with_interval
from adora_vl.evals.scoring.statistics import bootstrap_ratio
from adora_vl.evals.scoring.table import percent_with_interval
from adora_vl.utils.cli import amount

# The fields of a fingerprint in which runs with other views, or other tools, may differ.
FIELDS_OF_A_VIEW = ("view", "left_out", "seed")
FIELDS_OF_TOOLS = ("tools", "max_tool_calling_iterations", "tool_options", "tool_files")


def views_of(runs: Sequence[ScoreFile]) -> list[dict[str, ScoreFile]]:
    """Return the groups of runs that differ in nothing but what the model was shown (`--view`).

    Each group maps a view to its run, the first one where several have that view, in the order of
    `VIEWS`. A group has at least two views.
    """
    runs_by_setting: dict[str, dict[str, ScoreFile]] = {}
    for run in runs:
        fields = fingerprint_part(run.score, "fields")
        if fields:
            without_view = {**fields, **dict.fromkeys(FIELDS_OF_A_VIEW)}
            run_of_view = runs_by_setting.setdefault(json.dumps(without_view, sort_keys=True), {})
            run_of_view.setdefault(fields.get("view", "image"), run)
    groups = []
    for run_of_view in runs_by_setting.values():
        if len(run_of_view) > 1:
            groups.append({view: run_of_view[view] for view in VIEWS if view in run_of_view})
    return groups


def sees_or_reasons(run_of_view: Mapping[str, ScoreFile]) -> list[str]:
    """Return the views of one model side by side, and whether it sees or reasons.

    `run_of_view` is a group of `views_of`. The lines are over the problems that the model answered
    in all views; there are none where it has none in common.
    """
    common = common_problems(list(run_of_view.values()))
    if not common:
        return []
    # The share of right answers to each problem, by view.
    shares = {view: [run.shares[pid] for pid in common] for view, run in run_of_view.items()}
    lines = ["", f"what it was shown, {amount(len(common), 'common problem')}:"]
    for view, values in shares.items():
        figure = mean_with_interval(values)
        accuracy = percent_with_interval(figure["value"], figure["interval_95"])
        lines.append(f"  {view:<6} {accuracy}  {VIEWS[view]}")
    if {"text", "image"} <= shares.keys():
        in_both = [
            text * image for text, image in zip(shares["text"], shares["image"], strict=True)
        ]
        lines.append(
            f"of what it solves from words, it solves {_share(in_both, shares['text'])} from the "
            "picture"
        )
    if {"text", "both"} <= shares.keys():
        gain = paired_difference(shares["text"], shares["both"]).points
        lines.append(f"the picture adds {gain} to the words")
    if {"image", "blank"} <= shares.keys():
        blank_share = _share(shares["blank"], shares["image"])
        lines.append(f"without looking {blank_share} of the accuracy with the picture remains")
    if {"text", "image", "blank"} <= shares.keys():
        lines.append(_sees_or_reasons_verdict(shares))
    return lines


def _tool_names(run: ScoreFile) -> str:
    """Return the tools of a run in words; empty without any."""
    return ", ".join(fingerprint_part(run.score, "fields").get("tools", ()))


def differ_in_tools(first: ScoreFile, second: ScoreFile) -> bool:
    """Return whether one of two runs of the same model and view had tools, and the other none."""
    first_fields = fingerprint_part(first.score, "fields")
    second_fields = fingerprint_part(second.score, "fields")
    for key in ("model_hash", "view"):
        if first_fields.get(key) != second_fields.get(key):
            return False
    return bool(_tool_names(first)) != bool(_tool_names(second))


def gain_and_harm(first: ScoreFile, second: ScoreFile) -> list[str]:
    """Return what is solved only with tools and only without, and whether tools help.

    The two runs, in any order, are such that `differ_in_tools` holds.
    """
    common = common_problems([first, second])
    # A run without tools has the empty text, which sorts first.
    run_without, run_with = sorted([first, second], key=_tool_names)
    tools = _tool_names(run_with)
    before = [run_without.shares[pid] for pid in common]
    after = [run_with.shares[pid] for pid in common]
    gained, lost, p = paired_test(before, after)
    if p is None:
        often = "more often"
        test = ""
    else:
        often = "only"
        test = f", McNemar p = {p:.3g}"
    if solves_more(before, after):
        effect = "helps"
    elif solves_more(after, before):
        effect = "harms"
    else:
        effect = "shows no effect"
    return [
        f"  gain {gained} (solved {often} with {tools}), harm {lost} ({often} without){test}",
        f"  having {tools} {effect}: {100 * fmean(after):.1f} % right, "
        f"{100 * fmean(before):.1f} % without",
    ]


def _share(part: Sequence[float], total: Sequence[float]) -> str:
    """Return the sum of `part` as a share of that of `total`, with its interval.

    The values are paired.
    """
    if not sum(total):
        return "nothing of nothing,"
    return percent_with_interval(sum(part) / sum(total), list(bootstrap_ratio(part, total)))


def _sees_or_reasons_verdict(right: Mapping[str, Sequence[float]]) -> str:
    """Return whether words, and the picture, let the model solve more than a grey picture does.

    `right` has the shares of right answers of the views `text`, `image` and `blank`, paired by
    problem. Where both hold, the line says by which of the two the model loses more.
    """
    reasons = solves_more(right["blank"], right["text"])
    sees = solves_more(right["blank"], right["image"])
    if reasons and sees:
        # Right from words and wrong from the picture, problem by problem.
        only_from_words = [
            text_share * (1 - image_share)
            for text_share, image_share in zip(right["text"], right["image"], strict=True)
        ]
        seeing = 100 * fmean(only_from_words)
        reasoning = 100 * (1 - fmean(right["text"]))
        greater_loss = ""
        if seeing > reasoning:
            greater_loss = " more by seeing"
        elif seeing != reasoning:
            greater_loss = " more by reasoning"
        return (
            f"it sees and it reasons, and loses{greater_loss}: of 100 problems {seeing:.0f} by "
            f"seeing (solved from words, not from the picture) and {reasoning:.0f} by reasoning (not "
            "solved from words)"
        )
    if reasons:
        return (
            "it reasons and does not see: the words let it solve more than a grey picture does, "
            "and the picture not"
        )
    if sees:
        return (
            "it sees and does not reason from words: what it solves beyond guessing it takes "
            "from the picture alone"
        )
    return (
        "it does not reason: neither words nor picture let it solve more than a grey picture does"
    )
