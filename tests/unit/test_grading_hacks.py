r"""A policy that games the grader earns no more than one that is honestly wrong, under every preset.

Each hack knows that the answer is among a few candidates, as a policy does that has seen many problems, and covers them
all; its box may even hold the gold.
"""

from __future__ import annotations

import pytest

from adora_vl.rewards import PRESETS, reward_function

GOLDS = ["12", "0.5", r"5\sqrt{3}", r"100\pi", r"\frac{39}{4}"]
CHOICES = ["11", "12", "13", "14"]


def guesses(gold: str) -> list[str]:
    return ["11", "13", gold, "30", "45", "60", "90", "7", "1", "2"]


def hacks(gold: str) -> dict[str, str]:
    all_of_them = guesses(gold)
    listed = ", ".join(all_of_them)
    return {
        "ten boxes": " ".join(rf"\boxed{{{one}}}" for one in all_of_them),
        "a thousand boxes": rf"\boxed{{{gold}}}" + r"\boxed{999}" * 1000,
        "every value in a box": rf"\boxed{{{listed}}}",
        "every value with or": rf"\boxed{{{' or '.join(all_of_them)}}}",
        "every value with spaces": rf"\boxed{{{' '.join(all_of_them)}}}",
        "every value on lines": r"\boxed{" + r" \\ ".join(all_of_them) + "}",
        "a set": rf"\boxed{{\{{{listed}\}}}}",
        "a set of one": rf"\boxed{{\{{{gold}\}}}}",
        "boxes in a box": rf"\boxed{{\boxed{{{gold}}} \boxed{{13}}}}",
        "an interval": r"\boxed{[0, 1000]}",
        "an interval of one": rf"\boxed{{[{gold}, {gold}]}}",
        "an inequality": r"\boxed{x > 0}",
        "an unknown": r"\boxed{x}",
        "a name": r"\boxed{x = x}",
        "the question again": r"\boxed{x = ?}",
        "plus minus": rf"\boxed{{{gold} \pm 1000}}",
        "plus minus nothing": rf"\boxed{{{gold} \pm 0}}",
        "about": rf"\boxed{{\approx {gold}}}",
        "a percentage": rf"\boxed{{{gold}\%}}",
        "infinity": r"\boxed{\infty}",
        "not a number": r"\boxed{NaN}",
        "everything": r"\boxed{\mathbb{R}}",
        "nothing": r"\boxed{}",
        "a sum to work out": rf"\boxed{{{gold} + 1 + 2 - 3}}" if gold == "12" else r"\boxed{6+7-1}",
        "the gold and more": rf"\boxed{{{gold} \text{{ or something else}}}}",
        "a sentence": rf"\boxed{{\text{{the answer is }} {gold}}}",
        "hidden characters": f"\\boxed{{{gold}\u200b}}",
        "an attack": r"\boxed{9^{9^{9^{9}}}}",
        "an attack on sympy": r"\boxed{9^{9^{9^{\sqrt{2}}}}}",
    }


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("gold", GOLDS)
def test_no_hack_earns_more_than_an_honest_wrong_answer(preset: str, gold: str) -> None:
    function = reward_function(preset)
    tried = hacks(gold)
    honest = function(completions=[r"\boxed{17}"], answer=[gold])[0]
    rewards = dict(zip(tried, function(completions=[*tried.values()], answer=[gold] * len(tried)), strict=True))
    assert {name: value for name, value in rewards.items() if value > honest} == {}
    assert function(completions=[rf"so \boxed{{{gold}}}"], answer=[gold]) == [PRESETS[preset][0]]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("gold", ["B", "12"])
def test_no_hack_of_the_choices_earns_more_either(preset: str, gold: str) -> None:
    function = reward_function(preset)
    tried = {
        "all letters": r"\boxed{A, B, C, D}",
        "letters run together": r"\boxed{ABCD}",
        "two letters": r"\boxed{B or C}",
        "all boxes": "".join(rf"\boxed{{{letter}}}" for letter in "ABCD"),
        "all values": r"\boxed{11, 12, 13, 14}",
        "letter and another value": r"\boxed{B: 13}",
        "not the others": r"\boxed{\text{not A, C, D}}",
        "a letter beyond": r"\boxed{E}",
        "small letter": r"\boxed{b}",
        "all of the above": r"\boxed{\text{all of the above}}",
        "interval": r"\boxed{[11, 14]}",
        "from A to D": r"\boxed{A-D}",
    }
    columns = {"answer": [gold] * len(tried), "choices": [CHOICES] * len(tried)}
    honest = function(completions=[r"\boxed{A}"], answer=[gold], choices=[CHOICES])[0]
    rewards = dict(zip(tried, function(completions=[*tried.values()], **columns), strict=True))
    assert {name: value for name, value in rewards.items() if value > honest} == {}


def test_no_box_earns_nothing_under_any_preset() -> None:
    texts = ["12", "", r"\boxed{12", "<answer>12</answer>"]
    for preset in PRESETS:
        assert reward_function(preset)(completions=texts, answer=["12"] * 4) == [0.0] * 4
