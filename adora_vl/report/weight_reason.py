"""The sentence of the viewer that says why a group has its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adora_vl.report.recipe import adora_options, methods_of, recipe_of

_CONTROLS = {  # `assign`: what decided the weight instead of the criteria
    "random": "by chance (assign: random)",
    "reversed": "as the criteria do not say (assign: reversed)",
    "rate": "with a scaled learning rate instead (assign: rate)",
}


def weight_reason(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """`group`: weight, tds, pass_rate, longest_right and mean_wrong as recorded, and `equal`: all rewards are the same.
    `settings`: the keys of the run, as the files of the record have them.
    """
    sentence = _weight(group, settings)
    if group["equal"] and group["weight"] is not None:
        sentence += " All rewards are equal, so every advantage is 0 and nothing is learned from it."
    return sentence


def _weight(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    weight, options = group["weight"], adora_options(settings)
    mode = options["mode"]
    if weight is None:
        return "No weight is recorded."
    verdict = _verdict(group, settings)
    if mode == "off" or "adora" not in methods_of(settings):
        return f"{recipe_of(settings)}, weight {weight:g}; ADORA's criteria say {verdict}."
    verb = "Attenuated to" if weight < 1 else "Amplified to" if weight > 1 else "Kept at weight"
    known = mode in ("attenuation", "amplification")
    if known and (how := _CONTROLS.get(str(options.get("assign")))):
        return f"{verb} {weight:g} {how}; ADORA's criteria say {verdict}."
    return f"{verb} {weight:g}: {verdict}." if known else f"{verb} {weight:g}."


def _verdict(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Whether the criteria call the group TAS or TDS, and why."""
    sayings = {"length": _length, "difficulty": _difficulty}
    criteria = [name for name in settings.get("adora_criteria", ()) if name in sayings]
    if not group["pass_rate"] and not group["tds"] and not _hard_is_enough(criteria, settings):
        return "neither TAS nor TDS, since no rollout is right"
    return ", ".join(["TDS" if group["tds"] else "TAS", *(sayings[name](group, settings) for name in criteria)])


def _hard_is_enough(criteria: list[str], settings: Mapping[str, Any]) -> bool:
    """Whether a group without a right rollout can be TAS, although there is no length to compare."""
    alone = criteria == ["difficulty"] or settings.get("adora_combine") == "any"
    return "difficulty" in criteria and alone and not settings.get("adora_difficulty_needs_correct")


def _length(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    longest, mean = group["longest_right"], group["mean_wrong"]
    if longest is None:
        return "no rollout is right"
    if mean is None:
        nothing = "all rollouts are right" if group["pass_rate"] == 1 else "every wrong rollout was cut off"
        holds = "holding" if settings.get("adora_empty_wrong") == "keep" else "failing"
        return f"{nothing}, so there is no finished wrong one to compare lengths with, which counts as {holds}"
    relation = "longer" if longest > mean else "not longer"
    return (
        f"the longest right rollout ({longest:.0f} tokens) is {relation} than the mean of the finished wrong ones "
        f"({mean:.1f} tokens)"
    )


def _difficulty(group: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    tau = settings.get("adora_tau", 0.5)
    if not group["pass_rate"] and settings.get("adora_difficulty_needs_correct"):
        return "a pass rate of 0% does not count as difficult"
    relation = "at most" if group["pass_rate"] <= tau else "above"
    return f"the pass rate {group['pass_rate']:.0%} is {relation} tau {tau:.0%}"
