"""The forecast of attenuation: groups by hand, a recorded run, stored answers."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from adora_vl.advantage import Groups
from adora_vl.record.record_files import ROLLOUTS_FOLDER, write_record_file
from adora_vl.record.rollouts import make_table
from data_prep.cli import main
from data_prep.forecast import forecast_attenuation


def groups_of(*rewards_and_lengths: tuple[list[float], list[int]], times: int = 25) -> Groups:
    """Groups as a recorded run has them: each pair of rewards and lengths `times` times over."""
    rewards = torch.tensor([group[0] for group in rewards_and_lengths] * times)
    lengths = torch.tensor([group[1] for group in rewards_and_lengths] * times)
    return Groups(rewards, lengths.float(), torch.zeros_like(rewards, dtype=torch.bool))


GUESSING_GROUP = ([1.0, 0.0, 0.0], [2, 9, 9])  # only the shortest is right: TDS
WORKING_GROUP = ([0.0, 1.0, 0.0], [2, 9, 4])  # the longest is right: TAS
TIED_GROUP = ([1.0, 0.0, 0.0], [6, 9, 3])  # TDS by an equal length
GROUP_WITHOUT_SIGNAL = ([1.0, 1.0, 1.0], [1, 2, 3])
GROUP_WITH_LOST_REWARD = (
    [1.0, math.nan, 0.0],
    [2, 99, 9],
)  # a rollout without a reward counts nowhere


def test_groups_that_agree_leave_the_difference_uncertain():
    """Groups that were not drawn could differ otherwise."""
    difference = forecast_attenuation(groups_of(TIED_GROUP)).longest_minus_shortest
    assert difference is not None
    assert difference.mean == 0
    assert difference.low < 0 < difference.high


def test_the_shares_of_groups_by_hand():
    """The forecast says what share of groups ADORA would attenuate (TDS), and what that means.

    In a TDS group no right answer is longer than the mean of the wrong ones. Of the four groups
    with signal the longest answer is right in one, and the shortest in two.
    """
    shares = forecast_attenuation(
        groups_of(
            GUESSING_GROUP, WORKING_GROUP, TIED_GROUP, GROUP_WITHOUT_SIGNAL, GROUP_WITH_LOST_REWARD
        )
    )
    # each of the five groups stands 25 times
    assert shares.groups == 5 * 25
    assert shares.tds.total == 4 * 25  # those with signal
    assert shares.tds.count == 3 * 25
    assert shares.ties.count == 25
    assert shares.short_only.count == 2 * 25
    assert shares.longest.value == 0.25
    assert shares.shortest.value == 0.5
    assert shares.longest_minus_shortest.low < -0.25 < shares.longest_minus_shortest.high < 0
    assert shares.sentence() == (
        "Attenuation would act on most of what there is to learn from (75% TDS), mostly those in "
        "which short answers win, and 33% of them are ties; short answers are right more often "
        "than long ones."
    )
    assert (
        forecast_attenuation(groups_of(WORKING_GROUP))
        .sentence()
        .startswith("Attenuation would hardly act: 0% of the groups with signal")
    )
    assert (
        "too few to say anything"
        in forecast_attenuation(groups_of(GUESSING_GROUP, GROUP_WITHOUT_SIGNAL, times=3)).sentence()
    )


def test_a_recorded_run_and_stored_answers_are_read(tmp_path, capsys):
    """The forecast reads the record of a run, and refuses a torn file or a missing folder.

    The run has twelve steps of two groups, which are all TDS.
    """
    columns: dict[str, list[Any]] = {
        "step": [1] * 6,
        "group": [0] * 3 + [1] * 3,
        "reward": [*GUESSING_GROUP[0], 1.0, math.nan, 0.0],
        "length": GUESSING_GROUP[1] + GROUP_WITH_LOST_REWARD[1],
        "truncated": [False] * 6,
    }
    table = make_table(columns, {"num_generations": 3, "adora_correct_above": 0.5})
    (tmp_path / ROLLOUTS_FOLDER).mkdir()
    for step in range(1, 13):
        write_record_file(tmp_path / ROLLOUTS_FOLDER, table, step, step)
    assert main(["filter", "--attenuation", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "24 of 24" in output
    assert output.endswith("short answers are right more often than long ones.\n")
    (tmp_path / ROLLOUTS_FOLDER / "rollouts-00000000-00000000.parquet").write_text("torn")
    assert main(["filter", "--attenuation", str(tmp_path)]) == 2
    assert "is no file of a run's record" in capsys.readouterr().err
    assert main(["filter", "--attenuation", str(tmp_path / "none")]) == 2
    assert "attenuation: " in capsys.readouterr().err


def test_stored_answers_need_several_with_their_lengths(tmp_path, capsys):
    """Stored answers with one answer to each problem are refused, since they make no group."""
    line = (
        '{"pid": "1", "sample": 0, "answer": "5", "response": "\\\\boxed{5}", "n_tokens": 3, '
        '"finish_reason": "stop"}\n'
    )
    (tmp_path / "predictions.jsonl").write_text(line)
    assert main(["filter", "--attenuation", str(tmp_path)]) == 2
    assert "has 1 answers to a problem" in capsys.readouterr().err


def answer_row(pid: str, sample: int, *, is_right: bool, **fields: object) -> dict[str, object]:
    """Return a row of predictions, whose right answer is 5."""
    return {
        "pid": pid,
        "sample": sample,
        "answer": "5",
        "response": "\\boxed{5}" if is_right else "\\boxed{6}",
        "n_tokens": 3 + sample,
        "finish_reason": "stop",
        **fields,
    }


def write_answers(file: Path, answers: Sequence[dict[str, object]]) -> None:
    """Write predictions, one a line."""
    file.write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))


def test_problems_with_too_few_answers_are_counted(tmp_path, capsys):
    """Problems with fewer answers than the others are left out, and counted.

    22 problems have two answers, one has one, and one was never asked.
    """
    answers = []
    for number in range(22):
        answers.append(answer_row(f"whole/{number}", sample=0, is_right=True))
        answers.append(answer_row(f"whole/{number}", sample=1, is_right=False))
    answers.append(answer_row("cut off", sample=0, is_right=True))
    answers += [
        answer_row("never asked", sample, is_right=False, finish_reason="image_failed", n_tokens=0)
        for sample in range(2)
    ]
    write_answers(tmp_path / "predictions.jsonl", answers)
    assert main(["filter", "--attenuation", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "2 problems left out" in output
    assert "22 of 22" in output


def test_rounding_counts_as_in_filtering(tmp_path, capsys):
    """With `--rounding` an answer that is right when rounded counts as right.

    2.33 is 7/3 with rounding alone, and only then the two answers differ in their reward.
    """
    answers = []
    for number in range(20):
        for sample, response in enumerate(("\\boxed{2.33}", "\\boxed{9}")):
            fields = {"answer": "\\frac{7}{3}", "response": response}
            answers.append(answer_row(str(number), sample, is_right=False, **fields))
    write_answers(tmp_path / "predictions.jsonl", answers)
    for options, expected in (((), "0 of 20"), (("--rounding",), "20 of 20")):
        assert main(["filter", "--attenuation", str(tmp_path), *options]) == 0
        assert expected in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("option", ["input", "output", "model", "predictions"])
def test_an_option_without_effect_is_refused(tmp_path, capsys, option):
    write_answers(tmp_path / "predictions.jsonl", [answer_row("1", sample=0, is_right=True)])
    assert main(["filter", "--attenuation", str(tmp_path), f"--{option}", "there"]) == 2
    assert f"{option}: there has no effect with --attenuation" in capsys.readouterr().err


def test_a_merged_file_that_was_not_deleted_counts_once(tmp_path, capsys):
    """A group that stands in two files of a run's record counts once.

    A run that is killed between merging files and deleting them leaves both.
    """
    folder = tmp_path / ROLLOUTS_FOLDER
    folder.mkdir()
    columns: dict[str, list[Any]] = {
        "step": [1] * 3,
        "reward": GUESSING_GROUP[0],
        "length": GUESSING_GROUP[1],
        "truncated": [False] * 3,
    }
    table = make_table(columns, {"num_generations": 3})
    write_record_file(folder, table, first_step=1, last_step=1)
    write_record_file(
        folder, table, first_step=1, last_step=2
    )  # as if the first one had been merged into it
    assert main(["filter", "--attenuation", str(tmp_path)]) == 0
    assert "1 of 1" in capsys.readouterr().out
    assert main(["filter", "--attenuation", str(tmp_path), "--rounding"]) == 2
    assert "has the rewards of a run, which are not graded anew" in capsys.readouterr().err


def test_answers_of_equal_length_are_ties_and_no_wins_of_short_ones():
    """Where all lengths are equal there is no longest and no shortest answer to compare."""
    forecast = forecast_attenuation(groups_of(([1.0, 0.0], [5, 5])))
    assert forecast.ties.value == 1
    assert forecast.short_only.count == 0
    assert forecast.lines()[-2] == f"{'longest - shortest':43}-"


def test_the_counts_are_those_of_loops_over_random_groups():
    """The forecast's counts are those of plain loops over 400 random groups of four answers."""
    rng = random.Random(0)
    rewards = [[rng.choice((0.0, 0.1, 1.0, math.nan)) for _ in range(4)] for _ in range(400)]
    lengths = [[rng.randint(1, 6) for _ in range(4)] for _ in range(400)]
    truncated = [[rng.random() < 0.2 for _ in range(4)] for _ in range(400)]
    forecast = forecast_attenuation(
        Groups(torch.tensor(rewards), torch.tensor(lengths), torch.tensor(truncated))
    )
    signal_count = 0
    tds_count = 0
    tie_count = 0
    short_only_count = 0
    differences = []
    for group in zip(rewards, lengths, truncated, strict=True):
        answers = [answer for answer in zip(*group, strict=True) if not math.isnan(answer[0])]
        if len({reward for reward, _, _ in answers}) < 2:
            continue
        signal_count += 1
        right_lengths = [length for reward, length, _ in answers if reward > 0.5]
        wrong_lengths = [length for reward, length, _ in answers if reward <= 0.5]
        finished = [length for reward, length, cut in answers if reward <= 0.5 and not cut]
        mean_wrong = fmean(finished) if finished else math.inf
        if right_lengths and max(right_lengths) <= mean_wrong:
            tds_count += 1
            if max(right_lengths) == mean_wrong:
                tie_count += 1
            elif max(right_lengths) <= min(wrong_lengths, default=math.inf):
                short_only_count += 1
        ends = min(length for _, length, _ in answers), max(length for _, length, _ in answers)
        if ends[0] < ends[1]:
            shares = [
                fmean(reward > 0.5 for reward, length, _ in answers if length == end)
                for end in ends
            ]
            differences.append(shares[1] - shares[0])
    assert (forecast.tds.total, forecast.tds.count) == (signal_count, tds_count)
    assert (forecast.ties.count, forecast.short_only.count) == (tie_count, short_only_count)
    assert forecast.longest_minus_shortest is not None
    assert forecast.longest_minus_shortest.mean == pytest.approx(fmean(differences))
