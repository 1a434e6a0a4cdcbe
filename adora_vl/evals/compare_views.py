"""Compares runs of one model with other views or tools: whether it sees, reasons, or needs tools.

A view is what the model was shown of a problem (`--view`): the picture, its facts in words, both,
or a grey picture.
"""

import json
from collections.abc import Mapping, Sequence
from statistics import fmean

from adora_vl.evals.inference.views import DESCRIPTION_BY_VIEW
from adora_vl.evals.score_differences import (
    find_common_version_ids,
    improves_significantly,
    paired_difference,
    paired_test,
    problem_count_text,
)
from adora_vl.evals.score_files import ScoreFile, fingerprint_part
from adora_vl.evals.scoring.score import mean_with_interval
from adora_vl.evals.scoring.statistics import ratio_interval
from adora_vl.evals.scoring.table import percent_with_interval

# The fields of a fingerprint in which runs of one model with other views, or other tools, differ.
VIEW_FIELDS = ("view", "left_out", "seed")
TOOL_FIELDS = ("tools", "max_tool_calling_iterations", "tool_options", "tool_files")


def group_runs_by_view(runs: Sequence[ScoreFile]) -> list[dict[str, ScoreFile]]:
    """Return the groups of runs that differ only in what the model was shown (`--view`).

    Each group has at least two views. It maps a view to its run, the first of several, in the order
    of `DESCRIPTION_BY_VIEW`: `{"image": run_a, "blank": run_b}`.
    """
    # The runs by view, for each combination of their other settings, written as JSON.
    runs_by_settings: dict[str, dict[str, ScoreFile]] = {}
    for run in runs:
        fields = fingerprint_part(run.score, "fields")
        if not fields:
            continue
        # All runs get the same None in the fields that a view changes.
        other_settings = {**fields, **dict.fromkeys(VIEW_FIELDS)}
        settings_text = json.dumps(other_settings, sort_keys=True)
        run_by_view = runs_by_settings.setdefault(settings_text, {})
        run_by_view.setdefault(fields.get("view", "image"), run)
    groups: list[dict[str, ScoreFile]] = []
    for run_by_view in runs_by_settings.values():
        if len(run_by_view) > 1:
            groups.append(
                {view: run_by_view[view] for view in DESCRIPTION_BY_VIEW if view in run_by_view}
            )
    return groups


def view_lines(run_by_view: Mapping[str, ScoreFile]) -> list[str]:
    """Compare runs of one model that was shown different views of the problems, in lines.

    The lines say how often it is right with each view, and whether it sees and whether it reasons.
    Only the problems that it answered in all views count; without any there are no lines. Most
    benchmarks ask each problem in one version. Where a problem has several versions, each has an id
    of its own and counts like a problem.

    `run_by_view` is a group of `group_runs_by_view`. Its views are some of `text` (the facts of the
    picture in words), `image`, `both` and `blank` (a grey picture).
    """
    common_version_ids = find_common_version_ids(list(run_by_view.values()))
    if not common_version_ids:
        return []
    # By view the accuracies in the order of these ids: 1 or 0 for a problem with one answer.
    accuracies_by_view = {
        view: run.accuracies_of(common_version_ids) for view, run in run_by_view.items()
    }
    problem_ids = next(iter(run_by_view.values())).problem_ids_of(common_version_ids)
    lines = ["", f"what it was shown, {problem_count_text(problem_ids, 'common problem')}:"]
    for view, accuracies in accuracies_by_view.items():
        mean = mean_with_interval(accuracies, problem_ids)
        accuracy_text = percent_with_interval(mean["value"], mean["interval_95"])
        lines.append(f"  {view:<6} {accuracy_text}  {DESCRIPTION_BY_VIEW[view]}")
    views = accuracies_by_view.keys()
    if {"text", "image"} <= views:
        from_words = accuracies_by_view["text"]
        from_picture = accuracies_by_view["image"]
        # A product of two accuracies is 1 for a problem that is solved in both views.
        solved_in_both = [
            words * picture for words, picture in zip(from_words, from_picture, strict=True)
        ]
        ratio_text = _ratio_text(solved_in_both, from_words, problem_ids)
        lines.append(f"of what it solves from words, it solves {ratio_text} from the picture")
    if {"text", "both"} <= views:
        gain = paired_difference(
            accuracies_by_view["text"], accuracies_by_view["both"], problem_ids
        )
        lines.append(f"the picture adds {gain.text_in_points} to the words")
    if {"image", "blank"} <= views:
        ratio_text = _ratio_text(
            accuracies_by_view["blank"], accuracies_by_view["image"], problem_ids
        )
        lines.append(f"without looking {ratio_text} of the accuracy with the picture remains")
    if {"text", "image", "blank"} <= views:
        lines.append(_seeing_and_reasoning_line(accuracies_by_view, problem_ids))
    return lines


def _tool_names(run: ScoreFile) -> str:
    """Return the names of a run's tools, with commas between them; empty without tools."""
    return ", ".join(fingerprint_part(run.score, "fields").get("tools", ()))


def differ_in_tools(first: ScoreFile, second: ScoreFile) -> bool:
    """Return whether two runs are of the same model and view, and only one of them had tools."""
    first_fields = fingerprint_part(first.score, "fields")
    second_fields = fingerprint_part(second.score, "fields")
    for key in ("model_hash", "view"):
        if first_fields.get(key) != second_fields.get(key):
            return False
    return bool(_tool_names(first)) != bool(_tool_names(second))


def tool_lines(first: ScoreFile, second: ScoreFile) -> list[str]:
    """Say how many problems are solved only with tools and only without, and whether tools help.

    Exactly one of the two runs had tools; it may be either. Returns lines for the screen.
    """
    common_version_ids = find_common_version_ids([first, second])
    # The names of a run without tools are the empty text, which sorts first.
    run_without, run_with = sorted([first, second], key=_tool_names)
    tools = _tool_names(run_with)
    accuracies_without = run_without.accuracies_of(common_version_ids)
    accuracies_with = run_with.accuracies_of(common_version_ids)
    problem_ids = run_without.problem_ids_of(common_version_ids)
    test = paired_test(accuracies_without, accuracies_with, problem_ids)
    if test.p is None:  # there are several answers to a problem
        how_often = "more often"
        test_text = ""
    else:
        how_often = "only"
        test_text = f", McNemar p = {test.p:.3g}"
    if improves_significantly(accuracies_without, accuracies_with, problem_ids):
        effect = "helps"
    elif improves_significantly(accuracies_with, accuracies_without, problem_ids):
        effect = "harms"
    else:
        effect = "shows no effect"
    return [
        f"  gain {test.gained} (solved {how_often} with {tools}), harm {test.lost} ({how_often} "
        f"without){test_text}",
        f"  having {tools} {effect}: {100 * fmean(accuracies_with):.1f} % right, "
        f"{100 * fmean(accuracies_without):.1f} % without",
    ]


def _ratio_text(parts: Sequence[float], wholes: Sequence[float], problem_ids: Sequence[str]) -> str:
    """Format sum(parts) / sum(wholes) in percent with its interval: `50.0 % (95 %: 30.1 to 69.9)`.

    `problem_ids` has the problem of each pair of a part and a whole.
    """
    if not sum(wholes):
        return "nothing of nothing,"  # the ratio 0 / 0 as a part of a sentence
    interval = ratio_interval(parts, wholes, problem_ids)
    return percent_with_interval(sum(parts) / sum(wholes), interval)


def _seeing_and_reasoning_line(
    accuracies_by_view: Mapping[str, Sequence[float]], problem_ids: Sequence[str]
) -> str:
    """Say whether a model sees and whether it reasons.

    It reasons if it solves more from words than from a grey picture, which it can only guess at. It
    sees if it solves more from the picture than from a grey one. Where both hold, the line says by
    which of the two the model loses more. For example, if it solves the first two of four problems
    from words, and the first alone from the picture, it loses 25 of 100 problems by seeing and 50
    by reasoning.

    Args:
        accuracies_by_view: The accuracy on each problem for the views `text`, `image` and `blank`.
        problem_ids: The problem of each accuracy; versions of one problem have the same.
    """
    from_words = accuracies_by_view["text"]
    from_picture = accuracies_by_view["image"]
    model_reasons = improves_significantly(accuracies_by_view["blank"], from_words, problem_ids)
    model_sees = improves_significantly(accuracies_by_view["blank"], from_picture, problem_ids)
    if model_reasons and model_sees:
        # Right from words and wrong from the picture, problem by problem.
        only_from_words = [
            words * (1 - picture) for words, picture in zip(from_words, from_picture, strict=True)
        ]
        lost_by_seeing = 100 * fmean(only_from_words)
        lost_by_reasoning = 100 * (1 - fmean(from_words))
        greater_loss = ""
        if lost_by_seeing > lost_by_reasoning:
            greater_loss = " more by seeing"
        elif lost_by_seeing != lost_by_reasoning:
            greater_loss = " more by reasoning"
        return (
            f"it sees and it reasons, and loses{greater_loss}: of 100 problems "
            f"{lost_by_seeing:.0f} by seeing (solved from words, not from the picture) and "
            f"{lost_by_reasoning:.0f} by reasoning (not solved from words)"
        )
    if model_reasons:
        return (
            "it reasons and does not see: the words let it solve more than a grey picture does, "
            "and the picture not"
        )
    if model_sees:
        return (
            "it sees and does not reason from words: what it solves beyond guessing it takes "
            "from the picture alone"
        )
    return (
        "it does not reason: neither words nor picture let it solve more than a grey picture does"
    )
