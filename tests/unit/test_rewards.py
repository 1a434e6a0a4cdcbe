"""The reward presets, called the way TRL's GRPO trainer calls them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from adora_vl.errors import UserError
from adora_vl.rewards import PRESETS, grade_batch, reward_function, reward_functions

TEXTS = [r"so \boxed{5}", r"so \boxed{6}", r"so \boxed{\input{x}}", r"so 5", r"\boxed{5"]
EXPECTED = {
    "adora": [1.0, 0.1, 0.1, 0.0, 0.0],
    "easyr1": [1.0, 0.1, 0.1, 0.0, 0.0],
    "accuracy": [1.0, 0.0, 0.0, 0.0, 0.0],
    "format": [1.0, 1.0, 1.0, 0.0, 0.0],
}


class Log:
    """Stands for the trainer's two logging hooks."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def extra(self, column: str, values: list[Any]) -> None:
        self.columns.setdefault(column, []).extend(values)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


def conversational(texts: list[str]) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def trl_call(function: Any, completions: list[Any], **columns: Any) -> list[float]:
    """The keyword arguments of `GRPOTrainer._calculate_rewards` in TRL 1.16."""
    log = columns.pop("log", Log())
    rewards: list[float] = function(
        prompts=["?"] * len(completions),
        completions=completions,
        completion_ids=[[1]] * len(completions),
        id=["row"] * len(completions),
        images=[None] * len(completions),
        trainer_state=None,
        log_extra=log.extra,
        log_metric=log.metric,
        **columns,
    )
    return rewards


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("form", ["messages", "parts", "strings"])
def test_rewards_of_a_preset_in_every_form_of_completion(preset: str, form: str) -> None:
    parts: list[Any] = [[{"role": "assistant", "content": [{"type": "text", "text": text}]}] for text in TEXTS]
    forms: dict[str, list[Any]] = {"messages": conversational(TEXTS), "parts": parts, "strings": [*TEXTS]}
    assert trl_call(reward_function(preset), forms[form], answer=["5"] * 5) == pytest.approx(EXPECTED[preset])


def test_every_preset_is_covered_and_named_for_trl() -> None:
    assert set(EXPECTED) == set(PRESETS)
    assert [reward_function(preset).__name__ for preset in PRESETS] == [f"{preset}_reward" for preset in PRESETS]
    assert not inspect.iscoroutinefunction(reward_function("adora"))  # TRL would run it elsewhere


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'adroa'.*adora, easyr1, accuracy.*did you mean 'adora'"):
        reward_function("adroa")


def test_the_hooks_get_one_verdict_and_one_extracted_answer_a_completion() -> None:
    log = Log()
    trl_call(reward_function("adora"), conversational(TEXTS), answer=["5"] * 5, log=log)
    assert log.columns == {
        "verdict": ["correct", "wrong", "unparseable", "unparseable", "unparseable"],
        "extracted": ["5", "6", r"\input{x}", None, None],
        "reason": ["same_number", "different_number", "not_read", "no_box", "no_box"],
    }
    times = {name: log.metrics.pop(name) for name in ("grading/ms_median", "grading/ms_p99")}
    assert 0 < times["grading/ms_median"] <= times["grading/ms_p99"]
    assert log.metrics == pytest.approx(
        {
            "grading/correct": 0.2,
            "grading/wrong": 0.2,
            "grading/unparseable": 0.6,
            "grading/timeout": 0.0,
            "grading/symbolic": 0.0,
        }
    )


def test_what_reached_sympy_is_counted() -> None:
    log = Log()
    texts = conversational([r"\boxed{3+x}", r"\boxed{2x}", r"\boxed{x+3}", r"\boxed{3}"])
    assert trl_call(reward_function("accuracy"), texts, answer=["x + 3"] * 4, log=log) == [1.0, 0.0, 1.0, 0.0]
    assert log.metrics["grading/symbolic"] == 0.5


def test_the_hooks_and_choices_may_be_missing() -> None:
    assert reward_function("adora")(completions=TEXTS, answer=["5"] * 5) == EXPECTED["adora"]


def test_choices_belong_to_their_own_row() -> None:
    texts = [r"\boxed{B}", r"\boxed{B}", r"\boxed{B}", r"\boxed{13}"]
    rewards = trl_call(
        reward_function("accuracy"),
        conversational(texts),
        answer=["13", "13", "13", "B"],
        choices=[["12", "13"], ["13", "12"], None, ["12", "13"]],
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0]


def test_rounding_is_off_unless_asked_for() -> None:
    texts = conversational([r"\boxed{8.66}"])
    assert trl_call(reward_function("adora"), texts, answer=[r"5\sqrt{3}"]) == [0.1]
    assert trl_call(reward_function("adora", rounding=True), texts, answer=[r"5\sqrt{3}"]) == [1.0]


def test_several_rewards_grade_and_log_a_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def counting(responses: list[str], golds: list[str], **options: Any) -> Any:
        seen.extend(responses)
        return grade_batch(responses, golds, **options)

    monkeypatch.setattr("adora_vl.rewards.presets.grade_batch", counting)
    log = Log()
    functions = reward_functions(["accuracy", "format"])
    rewards = [trl_call(one, conversational(TEXTS), answer=["5"] * 5, log=log) for one in functions]
    assert rewards == [EXPECTED["accuracy"], EXPECTED["format"]]
    assert seen == TEXTS
    assert len(log.columns["verdict"]) == len(TEXTS)  # twice as many would shift TRL's table of completions
    # the next step: the same texts with other golds are another batch
    assert trl_call(functions[0], conversational(TEXTS), answer=["6"] * 5) == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("presets", "message"), [([], "names no reward preset"), (["accuracy", "accuracy"], "'accuracy' is given twice")]
)
def test_a_list_of_rewards_that_means_nothing_is_refused(presets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward_functions(presets)


def test_empty_completions_and_empty_batches_get_their_rewards() -> None:
    log = Log()
    assert trl_call(reward_function("adora"), [[], "", conversational([""])[0]], answer=["5"] * 3) == [0.0] * 3
    assert trl_call(reward_function("adora"), [], answer=[], log=log) == []
    assert log.metrics == {}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no column 'answer'"),
        ({"answer": ["5"]}, "one value for each of the 2 completions"),
        ({"answer": ["5", "5"], "choices": [None]}, "one value for each of the 2 completions"),
        ({"answer": ["5", "12, 13"]}, r"'12, 13'.*enumeration"),
        ({"answer": ["5", None]}, r"None.*not_a_string"),
        ({"answer": ["5", "C"], "choices": [None, ["1", "2"]]}, r"'C'.*letter_without_choice"),
    ],
)
def test_a_gold_that_cannot_be_graded_is_an_error_not_a_silent_zero(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trl_call(reward_function("adora"), [r"\boxed{5}", r"\boxed{5}"], **columns)
