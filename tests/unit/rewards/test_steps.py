"""The reward `steps`: what a response earns for true claims on its figure."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.advantage.adora import Adora
from adora_vl.evals.records import GradedAnswer, RowGrade
from adora_vl.evals.scoring.steps import step_metrics
from adora_vl.evals.scoring.table import step_lines
from adora_vl.geometry.figure import figure_as_json
from adora_vl.geometry.solve_form import solve_form
from adora_vl.geometry.text import read_form_from_text
from adora_vl.preflight.check_rewards import check_criteria
from adora_vl.report.run_view import ROLLOUT_FIELDS, load_run
from adora_vl.rewards.choose import check_reward_sums, choose_rewards, range_of_weighted_sum
from adora_vl.rewards.explain import main
from adora_vl.rewards.steps import StepsReward, check_claims, text_up_to_answer
from adora_vl.utils.errors import UserError
from tests.support.recorded_runs import write_recorded_run

TRIANGLE_FACTS = """
triangle ABC
AB = BC, AB = 13, AC = 10
D on AC
BD perpendicular AC
find area ABC
"""
TRUE_WORKING = r"AD = 5. BD = \sqrt{13^2 - 5^2} = 12. \boxed{60}"
FALSE_WORKING = r"AD = 6. BD = \sqrt{13^2 - 5^2} = 12. \boxed{60}"
BARE_ANSWER = r"\boxed{60}"
CLAIM_TEXTS = (
    *("AD = 5", "AD = 6", "BD = 12", "BD = 11", "AB = 13", "2AB = 26", "AD = DC", "h = 3"),
    *("BD bisects ∠ABC", "∠BAC = 67.38", "∠BAC = 50", "AD^2 + BD^2 = AB^2", "AC = 10.2"),
)


@pytest.fixture(scope="module")
def figure_json() -> str:
    """The solved figure of `TRIANGLE_FACTS`, as JSON: what the column `figure` of a row has."""
    result = solve_form(read_form_from_text(TRIANGLE_FACTS))
    assert result.figure is not None
    return figure_as_json(result.figure)


def call_reward(
    reward: StepsReward, texts: list[str], figures: list[str | None], **columns: Any
) -> Any:
    """Return the rewards of texts, as the trainer calls for them."""
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return reward(completions, figure=figures, **columns)


@pytest.mark.parametrize(
    ("text", "expected_reward"),  # true new claims / (those + 3 for each false one)
    [
        (TRUE_WORKING, 1.0),
        (FALSE_WORKING, 1 / 4),  # one error costs three new claims
        (BARE_ANSWER, 0.0),
        ("AB = 13. 2AB = 26. AC/2 = 5. AB + AC = 23.", 0.0),  # given, and arithmetic on it
        ("AD = 5. " * 50, 1.0),  # saying it again earns no more
        ("AD = 5. AD = 5. AD = 6. AD = 6. AD = 6.", 1 / 4),
        ("The side is thirteen, so half of it is not needed. h = 3.", 0.0),
        ("area of triangle ABC = 60", 0.0),  # the answer itself is no step
        (rf"{BARE_ANSWER} AD = 5. BD = 12.", 0.0),  # behind the box
        ("AD = 1. AD = 2. AD = 3. AD = 4. AD = 5. BD = 12.", 2 / 14),  # guesses
    ],
)
def test_a_response_earns_the_share_of_what_is_true(
    figure_json: str, text: str, expected_reward: float
) -> None:
    assert call_reward(StepsReward(), [text], [figure_json]) == [pytest.approx(expected_reward)]


def test_a_row_without_a_figure_has_no_reward(figure_json: str) -> None:
    assert call_reward(StepsReward(), [TRUE_WORKING, TRUE_WORKING], [None, figure_json]) == [
        None,
        1.0,
    ]


def test_with_gate_a_wrong_answer_earns_nothing(figure_json: str) -> None:
    """With `gate` a right answer earns half and its claims the other half; a wrong one earns 0.

    The gold is 60: true working, false working and a bare answer are right, and 61 is wrong.
    """
    reward = StepsReward(gate=True)
    wrong_answer = TRUE_WORKING.replace("60", "61")
    rewards = call_reward(
        reward,
        [TRUE_WORKING, FALSE_WORKING, BARE_ANSWER, wrong_answer],
        [figure_json] * 4,
        answer=["60"] * 4,
    )
    # the shares of true claims are 1, 1/4 and 0
    assert rewards == [1.0, pytest.approx(0.5 + 0.5 / 4), 0.5, 0.0]


def test_the_reward_depends_on_response_and_row_alone(figure_json: str) -> None:
    """A response has the same reward alone and in any batch, so a resumed run needs no state."""
    texts = [TRUE_WORKING, FALSE_WORKING, BARE_ANSWER, "AD = 5.", "BD = 11. AD = 5.", ""]
    one_by_one = [call_reward(StepsReward(), [text], [figure_json])[0] for text in texts]
    reward = StepsReward()
    for seed in range(5):
        order = list(range(len(texts)))
        random.Random(seed).shuffle(order)
        together = call_reward(
            reward, [texts[number] for number in order], [figure_json] * len(texts)
        )
        assert together == [one_by_one[number] for number in order]


def test_it_logs_shares_and_shows_the_claims(figure_json: str) -> None:
    """The reward logs shares of its claims, and for each response its counts and its claims.

    The last of the four responses has no figure, and so no claims that could be checked.
    """
    logged: dict[str, float] = {}
    columns: dict[str, list[Any]] = {}
    call_reward(
        StepsReward(),
        [TRUE_WORKING, FALSE_WORKING, BARE_ANSWER, TRUE_WORKING],
        [figure_json, figure_json, figure_json, None],
        answer=["60"] * 4,
        log_metric=logged.__setitem__,
        log_extra=columns.__setitem__,
    )
    assert logged.pop("steps/ms") > 0
    assert logged == {
        "steps/figures": 3 / 4,  # the last row has no figure
        "steps/new": pytest.approx(2 / 3),  # of the three responses with a figure
        "steps/false": pytest.approx(1 / 3),
        "steps/unread": 0.0,  # of all claims
        "steps/lucky": pytest.approx(2 / 3),  # of the right answers: one with an error, one bare
    }
    assert columns["new"] == [2, 1, 0, None]
    assert columns["false"] == [0, 1, 0, None]
    # a span of each claim in the response: its start, its end, its verdict
    spans = json.loads(columns["steps"][1])
    start, end, _ = spans[0]
    assert FALSE_WORKING[start:end] == "AD = 6"
    assert [name for _, _, name in spans] == ["false", "new", "again"]
    assert columns["steps"][3] is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (r"a \boxed{1} b \boxed{x = \frac{1}{2}} c", r"a \boxed{1} b \boxed{x = \frac{1}{2}}"),
        (r"a \boxed{1", r"a \boxed{1"),
        ("no box", "no box"),
        (r"\boxed", r"\boxed"),
        ("<|begin_of_box|>1<|end_of_box|> c", "<|begin_of_box|>1<|end_of_box|>"),
        (
            "<|begin_of_box|>1<|end_of_box|> c <|end_of_box|>",
            "<|begin_of_box|>1<|end_of_box|>",
        ),
        (r"\boxed{1} c <|end_of_box|>", r"\boxed{1}"),
        (r"\boxed{1} c <|begin_of_box|>", r"\boxed{1}"),
    ],
)
def test_what_stands_behind_the_last_box_is_not_read(text: str, part: str) -> None:
    assert text_up_to_answer(text) == part


def test_a_figure_that_its_values_settle_counts_as_none() -> None:
    """A figure that three given values settle gives no reward.

    Nothing new can be said of it, and each right answer would count as luck.
    """
    facts = "triangle ABC\nAB = 8, angle A = 37, angle B = 54\nfind BC"
    result = solve_form(read_form_from_text(facts))
    assert result.figure is not None
    assert call_reward(StepsReward(), ["∠C = 89"], [figure_as_json(result.figure)]) == [None]


@pytest.mark.parametrize("padding", ["", "We look at the figure. " * 50, "AB = 13. " * 50])
@pytest.mark.parametrize("text", [TRUE_WORKING, FALSE_WORKING, BARE_ANSWER])
def test_length_earns_nothing(figure_json: str, text: str, padding: str) -> None:
    assert (
        check_claims(padding + text, figure_json).reward == check_claims(text, figure_json).reward
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lines=st.lists(st.sampled_from(CLAIM_TEXTS), max_size=12))
def test_the_reward_is_a_share_and_saying_it_again_earns_nothing(
    figure_json: str, lines: list[str]
) -> None:
    """Any claims in any order earn from 0 to 1, and the same when all of them are said twice."""
    text = ". ".join(lines)
    work = check_claims(text, figure_json)
    assert 0 <= work.reward <= 1
    assert check_claims(f"{text}. {text}", figure_json).reward == work.reward


def test_the_gate_pays_no_box_of_a_draft(figure_json: str) -> None:
    """A box in the thinking earns nothing, and one behind it earns the full reward.

    The template has opened the block of thinking, and the first response is cut off inside.
    """
    draft = rf"{TRUE_WORKING} \boxed{{60}}? Let me check."
    figure = [figure_json]
    metrics: dict[str, float] = {}
    rewards = call_reward(
        StepsReward(gate=True),
        [draft],
        figure,
        answer=["60"],
        thinking_opened=[True],
        log_metric=metrics.__setitem__,
    )
    assert rewards == [0.0]
    assert "steps/lucky" not in metrics, "no answer is right"
    closed = rf"{draft}</think> \boxed{{60}}"
    assert call_reward(
        StepsReward(gate=True), [closed], figure, answer=["60"], thinking_opened=[True]
    ) == [1.0]


def test_mistakes_are_refused_with_a_remedy(figure_json: str) -> None:
    """Missing columns, broken figures and wrong options each have their message."""
    with pytest.raises(UserError, match="needs the column 'figure'"):
        StepsReward()(["AB = 13"], answer=["60"])
    with pytest.raises(UserError, match="is no solved figure"):
        check_claims(TRUE_WORKING, '{"at": {}}')
    with pytest.raises(UserError, match="does not fulfil its facts"):
        check_claims(TRUE_WORKING, figure_json.replace("13", "14"))
    with pytest.raises(UserError, match="no column 'answer'"):
        call_reward(StepsReward(gate=True), [TRUE_WORKING], [figure_json])
    with pytest.raises(UserError, match=r"adora_reward.steps: unknown option 'gates'"):
        choose_rewards([{"steps": {"gates": True}}])
    with pytest.raises(UserError, match="is not true or false"):
        choose_rewards([{"steps": {"gate": 2}}])


def test_a_run_knows_its_range_and_its_column() -> None:
    """The reward is between 0 and 1, so the sum is at most 1.0 + 0.2, and rows need a figure."""
    chosen = choose_rewards(["accuracy", {"steps": {"gate": True}}])
    assert chosen.entries == ("accuracy", "steps")
    assert [function.__name__ for function in chosen.functions] == [
        "accuracy_reward",
        "steps_reward",
    ]
    assert range_of_weighted_sum(["accuracy", "steps"], [1.0, 0.2]) == (0.0, 1.2)
    check_reward_sums(["accuracy", "steps"], [1.0, 0.2], 0.5)
    with pytest.raises(UserError, match="needs the column 'figure'"):
        chosen.check_columns({"answer", "problem"})
    chosen.check_columns({"answer", "problem", "figure"})


def test_explain_shows_each_claim(
    tmp_path: Any, figure_json: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints each claim of a response with what the figure says of it.

    `--figure` takes the facts of a figure, or a figure that was solved already. Facts that fix no
    figure are refused.
    """
    facts = tmp_path / "facts.txt"
    facts.write_text(TRIANGLE_FACTS, encoding="utf-8")
    response = tmp_path / "response.txt"
    response.write_text(f"AB = 13. 2AB = 26. h = 3. {FALSE_WORKING}", encoding="utf-8")
    assert main(["--figure", str(facts), "--response", str(response)]) == 0

    printed = capsys.readouterr().out
    for line in (
        "true, given        AB = 13",
        "true, nothing new  2AB = 26",
        "unread             h = 3",
        "false              AD = 6",
        "steps 0.25   new 1, false 1, unread 1, of 6 claims",
    ):
        assert line in printed

    stored = tmp_path / "figure.json"
    stored.write_text(figure_json, encoding="utf-8")
    assert main(["--figure", str(stored), "--response", "AD = 5"]) == 0
    assert "true, new" in capsys.readouterr().out

    too_few_facts = tmp_path / "open.txt"
    too_few_facts.write_text("triangle ABC\nfind AB", encoding="utf-8")
    assert main(["--figure", str(too_few_facts), "--response", "AB = 5"]) == 2
    assert "has no figure to check claims on" in capsys.readouterr().err
    assert main(["--figure", str(tmp_path / "none"), "--response", "AB = 5"]) == 2


def test_adora_by_work_is_refused_where_nothing_measures_it() -> None:
    """ADORA's criterion `working` is refused without the reward `steps`, whose claims it reads."""
    by_working = Adora(criteria=("working",))
    config: Any = SimpleNamespace(methods=SimpleNamespace(by_name={"adora": by_working}))
    check_criteria(config, choose_rewards(["accuracy", "steps"]))
    with pytest.raises(UserError, match="add steps to adora_reward, with weight 0"):
        check_criteria(config, choose_rewards(["accuracy"]))
    config.methods.by_name = {"adora": Adora()}
    check_criteria(config, choose_rewards(["accuracy"]))


def test_an_evaluation_says_how_many_claims_are_true_and_how_much_is_luck(
    figure_json: str,
) -> None:
    """A right answer counts as luck if its working has an error, or no true claim at all."""
    rows: list[Any] = [
        {"pid": "0", "response": TRUE_WORKING, "figure": figure_json},
        {"pid": "1", "response": FALSE_WORKING, "figure": figure_json},
        {"pid": "2", "response": BARE_ANSWER, "figure": figure_json},
        {"pid": "3", "response": TRUE_WORKING},  # without a figure, so it is not counted
    ]
    all_right = [
        GradedAnswer(row["pid"], RowGrade("correct", extracted=None, reason="")) for row in rows
    ]

    metrics = step_metrics(rows, all_right)

    assert metrics is not None
    assert metrics["answers"] == 3
    assert metrics["true"]["value"] == pytest.approx((2 + 1 + 0) / 3)  # a response
    assert metrics["false"]["value"] == pytest.approx(1 / 3)
    assert metrics["lucky"]["count"] == 2
    assert "right by luck: 66.7 % " in step_lines(metrics)[2]
    assert step_metrics(rows[3:], all_right[3:]) is None

    wrong_answers = [GradedAnswer("0", RowGrade("wrong", extracted=None, reason=""))]
    metrics = step_metrics(rows[:1], wrong_answers)
    assert metrics is not None
    assert step_lines(metrics)[2] == "right by luck: no answer is right"


def test_the_page_of_a_run_has_the_places_of_claims_and_says_what_is_luck(
    tmp_path: Any, figure_json: str
) -> None:
    """The page gets the start and the end of each claim as JavaScript counts: in UTF-16 units.

    A smiley is two of them, and one character of Python. `write_recorded_run` writes the record of
    a finished run, with these columns in each rollout.
    """
    text = f"😀 {FALSE_WORKING}"
    claims = check_claims(text, figure_json)
    columns: dict[str, Any] = {
        "completion": text,
        "new": claims.new_count,
        "false": claims.false_count,
        "steps": claims.verdicts_as_json(),
    }

    view = load_run(write_recorded_run(tmp_path / "run", step_count=1, **columns), 100)

    # a rollout of the page is a list of values, in the order of `ROLLOUT_FIELDS`
    rollouts = [
        dict(zip(ROLLOUT_FIELDS, values, strict=True))
        for group in view.groups
        for values in group["rollouts"]
    ]
    by_verdict = {rollout["verdict"]: rollout for rollout in rollouts}
    start, end = by_verdict["correct"]["steps"][0][:2]
    utf16 = text.encode("utf-16-le")  # two bytes a unit
    assert utf16[2 * start : 2 * end].decode("utf-16-le") == "AD = 6"
    assert by_verdict["correct"]["luck"] == "lucky"
    assert by_verdict["wrong"]["luck"] is None

    without_claims = load_run(write_recorded_run(tmp_path / "without", step_count=1), 100)
    first_rollout = without_claims.groups[0]["rollouts"][0]
    assert first_rollout[list(ROLLOUT_FIELDS).index("steps")] is None
