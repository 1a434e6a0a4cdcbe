"""The reward presets, those for thinking included, called the way TRL's GRPO trainer calls them."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adora_vl.config.command import parse_command
from adora_vl.data.prompts import SYSTEM_PROMPT, SYSTEM_PROMPTS, asks_for_answer_tags
from adora_vl.prepare import prepare
from adora_vl.rewards import PRESETS, choose_rewards, grade_batch, reward_function
from adora_vl.rewards.choose import range_of_weighted_sum
from adora_vl.rewards.completion import (
    REFLECTIVE_WORD_PATTERN,
    REFLECTIVE_WORD_REGEX,
    last_boxed,
    reflective_words,
)
from adora_vl.utils.errors import UserError
from benchmarks.grading_corpus import cases
from tests.support.tiny_run import tiny_run_arguments

# right, wrong, unreadable, without a box, with a box that is not closed; the answer is 5
FIVE_RESPONSES = [r"so \boxed{5}", r"so \boxed{6}", r"so \boxed{\input{x}}", r"so 5", r"\boxed{5"]
REWARDS_BY_PRESET = {
    "boxed_accuracy": [1.0, 0.1, 0.1, 0.0, 0.0],
    "easyr1": [1.0, 0.1, 0.1, 0.0, 0.0],
    "accuracy": [1.0, 0.0, 0.0, 0.0, 0.0],
    "format": [1.0, 1.0, 1.0, 0.0, 0.0],
}


class RewardLog:
    """Stands for the trainer's two logging hooks."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def extra(self, column: str, values: list[Any]) -> None:
        self.columns.setdefault(column, []).extend(values)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


def as_messages(texts: list[str]) -> list[list[dict[str, Any]]]:
    """Each text as a completion in the form of a conversation, the only turn of the assistant."""
    return [[{"role": "assistant", "content": text}] for text in texts]


def call_as_trl(function: Any, completions: list[Any], **columns: Any) -> list[float]:
    """The rewards of `completions`, from a call as in `GRPOTrainer._calculate_rewards` of TRL 1.16.

    `columns` are those of the data; `log` is a `RewardLog` for what the function logs.
    """
    log = columns.pop("log", RewardLog())
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
def test_rewards_of_a_preset_in_every_form_of_completion(preset: str) -> None:
    """Messages, messages of parts, and strings get the same rewards."""
    parts: list[Any] = [
        [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
        for text in FIVE_RESPONSES
    ]
    forms: dict[str, list[Any]] = {
        "messages": as_messages(FIVE_RESPONSES),
        "parts": parts,
        "strings": [*FIVE_RESPONSES],
    }
    for form, completions in forms.items():
        rewards = call_as_trl(reward_function(preset), completions, answer=["5"] * 5)
        assert rewards == pytest.approx(REWARDS_BY_PRESET[preset]), form


def test_every_preset_is_covered_and_named_for_trl() -> None:
    """`REWARDS_BY_PRESET` has each preset, and TRL logs it by the name of its function."""
    assert set(REWARDS_BY_PRESET) == set(PRESETS)
    assert [reward_function(preset).__name__ for preset in PRESETS] == [
        f"{preset}_reward" for preset in PRESETS
    ]
    assert not inspect.iscoroutinefunction(
        reward_function("boxed_accuracy")
    )  # TRL would run it elsewhere


def test_another_name_of_a_preset_is_read_as_its_canonical_one() -> None:
    """The other name `adora` of a config is read as `boxed_accuracy`, and both are one name."""
    for entries in (["adora"], [{"adora": {"rounding": True}}]):
        chosen = choose_rewards(entries)
        assert chosen.entries == ("boxed_accuracy",)
        assert chosen.functions[0].__name__ == "boxed_accuracy_reward"
    assert reward_function("adora").__name__ == "boxed_accuracy_reward"
    with pytest.raises(UserError, match="'boxed_accuracy' is given twice"):
        choose_rewards(["adora", "boxed_accuracy"])


def test_the_sum_that_is_reachable_is_what_the_functions_give() -> None:
    """The range of the sum of rewards is known from the presets and their weights, or is None.

    A weight is 0 where a reward is only logged, so that its range does not matter.
    """
    for preset, expected in REWARDS_BY_PRESET.items():
        assert range_of_weighted_sum([preset], [1.0]) == (min(expected), max(expected)), preset
    # from 0 to 1, from -3 to 3 times the weight -1, and from 0 to 1 times the weight 0.5
    rewards = ["boxed_accuracy", "knights_logic_rl", "think_format"]
    assert range_of_weighted_sum(rewards, [1.0, -1.0, 0.5]) == (0 - 3 + 0, 1 + 3 + 0.5)
    assert range_of_weighted_sum(["boxed_accuracy", "my.py:f"], [1.0, 0.0]) == (0.0, 1.0)
    assert range_of_weighted_sum(["boxed_accuracy", "my.py:f"], [1.0, 0.1]) is None  # nobody knows
    assert range_of_weighted_sum(["judge"], [1.0]) is None  # nobody knows either


def test_the_hooks_get_one_verdict_and_one_extracted_answer_a_completion() -> None:
    """TRL's hooks get a verdict, an answer and a reason for each completion, and their shares.

    Of the five responses one is right, one wrong, and three cannot be read.
    """
    log = RewardLog()
    call_as_trl(
        reward_function("boxed_accuracy"), as_messages(FIVE_RESPONSES), answer=["5"] * 5, log=log
    )
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
            "grading/worked": 0.0,
        }
    )


def test_an_answer_shows_a_working_or_is_bare() -> None:
    """`grading/worked` is the share of responses that calculate something beside their box."""
    log = RewardLog()
    texts = [
        r"2 + 3 = 5. \boxed{5}",
        r"guess \boxed{5}",
        r"\boxed{x = 5}",
        "2 + 3 = 5",
        r"\boxed{4}. No: 2+3=5, \boxed{5}",
    ]
    call_as_trl(reward_function("boxed_accuracy"), as_messages(texts), answer=["5"] * 5, log=log)
    assert log.metrics["grading/worked"] == 3 / 5  # the first, the fourth and the last


def test_choices_belong_to_their_own_row() -> None:
    """B is right where 13 is the second choice of its row, and 13 is right for the letter."""
    texts = [r"\boxed{B}", r"\boxed{B}", r"\boxed{B}", r"\boxed{13}"]
    rewards = call_as_trl(
        reward_function("accuracy"),
        as_messages(texts),
        answer=["13", "13", "13", "B"],
        choices=[["12", "13"], ["13", "12"], None, ["12", "13"]],
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0]


def test_rounding_is_off_unless_asked_for() -> None:
    texts = as_messages([r"\boxed{8.66}"])
    assert call_as_trl(reward_function("boxed_accuracy"), texts, answer=[r"5\sqrt{3}"]) == [0.1]
    rounding = reward_function("boxed_accuracy", rounding=True)
    assert call_as_trl(rounding, texts, answer=[r"5\sqrt{3}"]) == [1.0]
    by_letter = call_as_trl(rounding, texts, answer=["B"], choices=[["5", r"5\sqrt{3}"]])
    assert by_letter == [0.1], "a letter asks for the very value of its choice"


def test_several_rewards_grade_and_log_a_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that two presets need is graded and logged once, and another batch anew."""
    graded_texts: list[str] = []

    def counting(responses: list[str], golds: list[str], **options: Any) -> Any:
        graded_texts.extend(responses)
        return grade_batch(responses, golds, **options)

    monkeypatch.setattr("adora_vl.rewards.presets.grade_batch", counting)
    log = RewardLog()
    functions = choose_rewards(["accuracy", "format"]).functions
    rewards = [
        call_as_trl(function, as_messages(FIVE_RESPONSES), answer=["5"] * 5, log=log)
        for function in functions
    ]
    assert rewards == [REWARDS_BY_PRESET["accuracy"], REWARDS_BY_PRESET["format"]]
    assert graded_texts == FIVE_RESPONSES
    # twice as many would shift TRL's table of completions
    assert len(log.columns["verdict"]) == len(FIVE_RESPONSES)
    # the next step: the same texts with other golds are another batch
    rewards_for_six = call_as_trl(functions[0], as_messages(FIVE_RESPONSES), answer=["6"] * 5)
    assert rewards_for_six == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_verdicts_are_logged_also_where_another_reward_stands_first() -> None:
    log = RewardLog()
    for function in choose_rewards(["think_format", "accuracy", "format"]).functions:
        call_as_trl(function, as_messages(FIVE_RESPONSES), answer=["5"] * 5, log=log)
    assert log.columns["verdict"] == ["correct", "wrong", *["unparseable"] * 3]
    assert log.metrics["grading/correct"] == 0.2


def test_an_empty_list_of_rewards_is_refused() -> None:
    with pytest.raises(UserError, match="names no reward"):
        choose_rewards([])


def test_empty_completions_and_empty_batches_get_their_rewards() -> None:
    function = reward_function("boxed_accuracy")
    empty_completions = [[], "", as_messages([""])[0]]
    assert call_as_trl(function, empty_completions, answer=["5"] * 3) == [0.0] * 3
    log = RewardLog()
    assert call_as_trl(function, [], answer=[], log=log) == []
    assert log.metrics == {}


COLUMNS_AND_ERRORS: list[tuple[dict[str, Any], str]] = [  # the columns of two rows, and the error
    ({}, "no column 'answer'"),
    ({"answer": ["5"]}, "one value for each of the 2 completions"),
    ({"answer": ["5", "5"], "choices": [None]}, "one value for each of the 2 completions"),
    ({"answer": ["5", "1, 2, ..."]}, r"'1, 2, ...'.*open_list"),
    ({"answer": ["5", None]}, r"None.*not_a_string"),
    ({"answer": ["5", "C"], "choices": [None, ["1", "2"]]}, r"'C'.*letter_without_choice"),
]


def test_a_reference_that_cannot_be_graded_against_is_an_error_not_a_silent_zero(
    subtests: Any,
) -> None:
    for columns, message in COLUMNS_AND_ERRORS:
        with subtests.test(message), pytest.raises(UserError, match=message):
            call_as_trl(reward_function("boxed_accuracy"), [r"\boxed{5}", r"\boxed{5}"], **columns)


BOXED_FIVE = "\\boxed{5}"
THINKING_FORMS = [  # the text, right as `think`, right as `think_answer`
    (f"<think>2 + 3</think>{BOXED_FIVE}", True, False),
    (f"<think>2 + 3</think>\n<answer>{BOXED_FIVE}</answer>\n", False, True),
    (f"  <think>a\nb</think> so {BOXED_FIVE}", True, False),
    (f"Hm. <think>a</think>{BOXED_FIVE}", False, False),
    (f"<think></think>{BOXED_FIVE}", False, False),
    ("<think>a</think>", False, False),
    (f"<think>a{BOXED_FIVE}", False, False),
    (f"<think>a</think></think>{BOXED_FIVE}", False, False),
    (f"<think>a<think>b</think>{BOXED_FIVE}", False, False),
    (f"<think>a</think><answer>{BOXED_FIVE}</answer> so", False, False),
    (f"<think>a</think> so <answer>{BOXED_FIVE}</answer>", False, False),
    ("<think>a</think><answer> </answer>", False, False),
    (f"<think>a</think><answer>{BOXED_FIVE}</answer><answer>{BOXED_FIVE}</answer>", False, False),
    (f"<answer>{BOXED_FIVE}</answer><think>a</think>", False, False),
    ("", False, False),
    ("<think>" * 100_000, False, False),
]


def test_only_the_whole_form_of_thinking_is_rewarded() -> None:
    """Each reward of form gives 1 to its own whole form alone, as a string and as a message."""
    functions = choose_rewards(["think_format", "think_answer_format"]).functions
    assert [function.__name__ for function in functions] == [
        "think_format_reward",
        "think_answer_format_reward",
    ]
    for text, *expected in THINKING_FORMS:
        for completions in ([text], as_messages([text])):
            rewards = [call_as_trl(reward, completions, answer=["5"])[0] for reward in functions]
            assert rewards == expected, text[:80]


def test_the_prompts_say_whether_the_tags_are_asked_for() -> None:
    """System prompt or template may ask for `<answer>` tags, and only `think_answer` does."""
    assert set(SYSTEM_PROMPTS) == {"boxed", "think", "think_answer"}
    assert all("\\boxed{" in prompt for prompt in SYSTEM_PROMPTS.values())
    assert [name for name, prompt in SYSTEM_PROMPTS.items() if asks_for_answer_tags(prompt)] == [
        "think_answer"
    ]
    assert asks_for_answer_tags(None, "{problem} Write <answer>5</answer>.")
    assert not asks_for_answer_tags(None, None)
    assert not asks_for_answer_tags(SYSTEM_PROMPT, "{problem}")


def test_an_answer_in_its_tags_is_graded_as_one_in_a_box() -> None:
    """An answer in tags has the verdict and the reason that it has in a box.

    That is tried on the labelled corpus without its attacks and rounded answers. Without the option
    an answer in tags is none.
    """
    answers: list[str] = []
    references: list[str] = []
    choices: list[Any] = []
    for case in cases():
        answer = last_boxed(case.response)
        is_plain = case.kind != "attacks" and not case.rounding
        if is_plain and answer is not None and "box" not in answer:
            answers.append(answer)
            references.append(case.gold)
            choices.append(case.choices)
    assert len(answers) > 600, "most of the corpus is compared"
    boxed = [rf"\boxed{{{answer}}}" for answer in answers]
    tagged = [f"<think>so</think><answer>{answer}</answer>" for answer in answers]

    grades_of_boxes = grade_batch(boxed, references, choices=choices)
    grades_of_tags = grade_batch(tagged, references, choices=choices, answer_tags=True)
    grades_without_option = grade_batch(tagged, references, choices=choices)

    assert grades_of_tags == grades_of_boxes
    assert {graded.reason for graded in grades_without_option} == {"no_box"}


def test_the_presets_take_tags_for_a_box_where_they_are_asked_for() -> None:
    """With `answer_tags` a preset gives an `<answer>` block what it gives a box without."""
    tags = ["<answer>12</answer>", "<answer>13</answer>", "12"]
    boxes = [r"\boxed{12}", r"\boxed{13}", "12"]
    for preset in PRESETS:
        rewards = reward_function(preset)(completions=boxes, answer=["12"] * 3)
        assert (
            reward_function(preset, answer_tags=True)(completions=tags, answer=["12"] * 3)
            == rewards
        ), preset
        assert reward_function(preset)(completions=tags, answer=["12"] * 3) == [0.0] * 3, preset


@pytest.mark.slow
def test_a_run_grades_the_tags_where_its_format_has_them(tmp_path: Path) -> None:
    """The system prompt `think_answer` asks for `<answer>` tags, and `think` does not."""
    completion = "<think>3 * 4</think><answer>12</answer>"
    for system_prompt, expected in (("think_answer", [1.0]), ("think", [0.0])):
        arguments = tiny_run_arguments(
            tmp_path / system_prompt, adora_system_prompt=system_prompt, adora_reward="accuracy"
        )
        (function,) = prepare(parse_command(arguments), "inspect").rewards.functions
        assert function(completions=[completion], answer=["12"]) == expected, system_prompt


@given(
    words=st.lists(
        st.sampled_from(
            [
                *REFLECTIVE_WORD_REGEX,
                "checking",
                "re-checked",
                "Wa\u0130t",
                "mi\u017ftake",
                "chec\u212a",
                "12°",
                "x",
            ]
        ),
        max_size=12,
    ),
    spell=st.sampled_from([str, str.upper, str.title]),
)
def test_words_of_reflection_are_those_that_every_pattern_finds_by_itself(words, spell) -> None:
    """The counts of all words together are those that each word's pattern finds by itself.

    Looking for a word's stem first may skip patterns, and no occurrence.
    """
    text = spell(" ".join(words))
    everywhere = {
        word: len(pattern.findall(text)) for word, pattern in REFLECTIVE_WORD_PATTERN.items()
    }
    assert reflective_words(text) == {word: n for word, n in everywhere.items() if n}


def test_words_of_reflection_are_counted_once_each_and_as_whole_words() -> None:
    """ "waiting", "waiter" and "checks" are no such words, and "re-check" is not also "check"."""
    text = (
        "Wait, I re-check it. Double-checked. However, waiting is no mistake; a waiter checks. "
        "Let me see: hold on."
    )
    expected = {
        "wait": 2,
        "check": 1,
        "recheck": 1,
        "double-check": 1,
        "however": 1,
        "mistake": 1,
        "let me see": 1,
    }
    assert reflective_words(text) == {**expected, "hold on": 1}
    assert reflective_words(r"so \boxed{5}") == {}
