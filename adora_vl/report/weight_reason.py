"""Says in words why ADORA gave a group its weight: the group's figures against ADORA's criteria."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from adora_vl.advantage.groups import as_schedule
from adora_vl.record.manifest import describe_recipe, recorded_adora_options, recorded_methods

# What decided the weight in place of ADORA's criteria, by the value of the option `assign`
_WORDS_BY_ASSIGN = {
    "random": "by chance (assign: random)",
    "reversed": "as the criteria do not say (assign: reversed)",
    "rate": "with a scaled learning rate instead (assign: rate)",
}


def weight_reason(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Explain in one to three sentences why ADORA gave a group its weight, for the page of a run.

    An example is `Attenuated to 0.5: TDS, the longest right rollout is not longer than the mean of
    the finished wrong ones.`

    Args:
        group: the group's recorded values `step` (from 1 on), `weight`, `tds`, `pass_rate`,
            `longest_right` and `mean_wrong`, and besides
            `equal`: whether all rewards are the same,
            `learned`: whether the rollouts have different advantages nevertheless,
            `left`: how many of the `size` rollouts have left the group, since they have no reward.
        settings: the keys of the run, as its record has them.
    """
    if group["left"] == group["size"]:
        return (
            "No rollout of the group has a reward to compare with another, so nothing is learned "
            "from it."
        )
    sentences = _weight_sentence(group, settings)
    if group["left"] > 0:
        sentences += (
            f" {group['left']} of {group['size']} rollouts have no reward, and count nowhere."
        )
    if group["equal"] and group["weight"] is not None:
        consequence = (
            "but the run's method learns from it too"
            if group["learned"]
            else "so every advantage is 0 and nothing is learned from it"
        )
        sentences += f" All rewards are equal, {consequence}."
    return sentences


def _weight_sentence(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the sentence with a group's weight and the verdict of ADORA's criteria on the group.

    Args:
        group: its recorded values, as `weight_reason` takes them.
        settings: the keys of the run.
    """
    weight = group["weight"]
    options = recorded_adora_options(settings)
    mode = options["mode"]
    if weight is None:
        return "No weight is recorded."
    verdict = _criteria_verdict(group, options)
    if mode == "off" or "adora" not in recorded_methods(settings):
        return f"{describe_recipe(settings)}, weight {weight:g}; ADORA's criteria say {verdict}."
    if weight < 1:
        verb = "Attenuated to"
    elif weight > 1:
        verb = "Amplified to"
    else:
        verb = "Kept at weight"
    # Runs that test the criteria may assign the weights in another way, such as by chance.
    assigned_words = _WORDS_BY_ASSIGN.get(options["assign"])
    if assigned_words is not None:
        return f"{verb} {weight:g} {assigned_words}; ADORA's criteria say {verdict}."
    return f"{verb} {weight:g}: {verdict}."


def _criteria_verdict(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Say what ADORA's criteria call a group, and what each criterion says of it.

    They call it TAS (temporarily advantageous to learn from), TDS (temporarily disadvantageous), or
    neither: `TDS, the pass rate is above tau, 50 %`. The group's own numbers are not in the text,
    since the page shows them beside it.

    Args:
        group: its recorded values, as `weight_reason` takes them.
        options: ADORA's options in the run, with all defaults.
    """
    reason_by_criterion = {
        "length": _length_reason,
        "difficulty": _difficulty_reason,
        "working": _work_reason,
    }
    criteria = list(options["criteria"])
    if criteria == ["working"] and options["no_figure"] == "keep" and not _has_work(group):
        return "neither TAS nor TDS, since no work is measured on the problem"
    # Without a right rollout only the criterion of difficulty can judge, since the others compare
    # right rollouts with wrong ones. It decides only if its own verdict is enough.
    one_criterion_decides = criteria == ["difficulty"] or options["combine"] == "any"
    difficulty_can_decide = (
        "difficulty" in criteria and one_criterion_decides and not options["needs_correct"]
    )
    has_right_rollout = bool(group["pass_rate"])
    if not has_right_rollout and not group["tds"] and not difficulty_can_decide:
        return "neither TAS nor TDS, since no rollout is right"
    reasons = [reason_by_criterion[criterion](group, options) for criterion in criteria]
    return ", ".join(["TDS" if group["tds"] else "TAS", *reasons])


def _length_reason(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Say whether the longest right rollout is longer than the mean of the wrong ones."""
    words = _ComparisonWords(
        measure="lengths",
        best_right="the longest right rollout",
        equal="as long as",
        greater="longer than",
    )
    return _comparison_reason(
        group,
        options,
        words=words,
        largest_right=group["longest_right"],
        mean_wrong=group["mean_wrong"],
    )


def _has_work(group: Mapping[str, Any]) -> bool:
    """Return whether the reward `steps` has counted the true steps of the group's rollouts."""
    return group.get("work_right") is not None or group.get("work_wrong") is not None


def _work_reason(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Say whether the right rollout with most true steps has more than the wrong ones on average.

    Where the steps were not counted (the "work" is not measured), the option `no_figure` decides
    whether the criterion says nothing or compares lengths instead.
    """
    if not _has_work(group):
        if options["no_figure"] == "keep":
            return "no work is measured on its problem, so that work says nothing"
        return f"no work is measured on its problem, and {_length_reason(group, options)}"
    words = _ComparisonWords(
        measure="work",
        best_right="the right rollout with most true steps",
        equal="as good as",
        greater="better than",
    )
    return _comparison_reason(
        group,
        options,
        words=words,
        largest_right=group["work_right"],
        mean_wrong=group["work_wrong"],
    )


class _ComparisonWords(NamedTuple):
    """The words of a sentence that compares a group's right rollouts with its wrong ones."""

    measure: str
    """What is compared, such as `lengths`."""
    best_right: str
    """The right rollout that is compared, such as `the longest right rollout`."""
    equal: str
    """`as long as`, for example."""
    greater: str
    """`longer than`, for example."""


def _comparison_reason(
    group: Mapping[str, Any],
    options: Mapping[str, Any],
    words: _ComparisonWords,
    *,
    largest_right: float | None,
    mean_wrong: float | None,
) -> str:
    """Say how the largest value of a right rollout compares with the mean of the wrong ones.

    The text is a part of the reason for the group's weight, such as `the longest right rollout is
    not longer than the mean of the finished wrong ones`.

    Args:
        group: its recorded values, as `weight_reason` takes them.
        options: ADORA's options. `ties` says how a group counts where the two values are equal.
            `empty_wrong` says it where there is no wrong rollout to compare with.
        words: the words for the measure.
        largest_right: the largest value among the right rollouts; None where none is right.
        mean_wrong: the mean of the wrong rollouts that were not cut off; None where there is none.
    """
    if largest_right is None:
        return "no rollout is right"
    if mean_wrong is None:
        all_right = group["pass_rate"] == 1
        cause = "all rollouts are right" if all_right else "every wrong rollout was cut off"
        outcome = "holding" if options["empty_wrong"] == "keep" else "failing"
        return (
            f"{cause}, so there is no finished wrong one to compare {words.measure} with, which "
            f"counts as {outcome}"
        )
    if largest_right == mean_wrong:
        outcome = "holding" if options["ties"] == "keep" else "failing"
        return (
            f"{words.best_right} is {words.equal} the mean of the finished wrong ones, which counts "
            f"as {outcome}"
        )
    relation = words.greater if largest_right > mean_wrong else f"not {words.greater}"
    return f"{words.best_right} is {relation} the mean of the finished wrong ones"


def _difficulty_reason(group: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Say whether a group counts as difficult: its pass rate is at most the option `tau`.

    With the option `needs_correct` a group without a right rollout does not count as difficult.
    """
    # recorded steps count from 1, schedules from 0
    steps_before = group["step"] - 1
    tau = as_schedule(options["tau"]).at(steps_before)
    has_right_rollout = bool(group["pass_rate"])
    if not has_right_rollout and options["needs_correct"]:
        return "a pass rate of 0 does not count as difficult"
    relation = "at most" if group["pass_rate"] <= tau else "above"
    return f"the pass rate is {relation} tau, {100 * tau:g} %"
