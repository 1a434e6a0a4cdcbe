"""The forecast of attenuation: groups by hand, a recorded run, stored answers."""

import math
from typing import Any

import torch

from adora_vl.advantage import Groups
from adora_vl.record.record_files import ROLLOUTS_FOLDER, write_part
from adora_vl.record.rollouts import make_table
from data_prep.cli import main
from data_prep.forecast import forecast_attenuation


def groups(*kinds: tuple[list[float], list[int]], times: int = 25) -> Groups:
    rewards = torch.tensor([kind[0] for kind in kinds] * times)
    lengths = torch.tensor([kind[1] for kind in kinds] * times)
    return Groups(rewards, lengths.float(), torch.zeros_like(rewards, dtype=torch.bool))


GUESSING_GROUP = ([1.0, 0.0, 0.0], [2, 9, 9])  # only the shortest is right: TDS
WORKING_GROUP = ([0.0, 1.0, 0.0], [2, 9, 4])  # the longest is right: TAS
TIED_GROUP = ([1.0, 0.0, 0.0], [6, 9, 3])  # TDS by an equal length
GROUP_WITHOUT_SIGNAL = ([1.0, 1.0, 1.0], [1, 2, 3])
GROUP_WITH_LOST_REWARD = (
    [1.0, math.nan, 0.0],
    [2, 99, 9],
)  # a rollout without a reward counts nowhere


def test_the_shares_of_groups_by_hand():
    shares = forecast_attenuation(
        groups(
            GUESSING_GROUP, WORKING_GROUP, TIED_GROUP, GROUP_WITHOUT_SIGNAL, GROUP_WITH_LOST_REWARD
        )
    )
    assert shares.groups == 125
    assert shares.tds.total == 100
    assert shares.tds.count == 75
    assert shares.ties.count == 25
    assert shares.short_only.count == 50
    assert shares.longest.value == 0.25
    assert shares.shortest.value == 0.5
    assert shares.longest_minus_shortest.low < -0.25 < shares.longest_minus_shortest.high < 0
    assert shares.sentence() == (
        "Attenuation would act on most of what there is to learn from (75% TDS), mostly those in "
        "which short answers win, and 33% of them are ties; short answers are right more often "
        "than long ones."
    )
    assert (
        forecast_attenuation(groups(WORKING_GROUP))
        .sentence()
        .startswith("Attenuation would hardly act: 0% of the groups with signal")
    )
    assert (
        "too few to say anything"
        in forecast_attenuation(groups(GUESSING_GROUP, GROUP_WITHOUT_SIGNAL, times=3)).sentence()
    )


def test_a_recorded_run_and_stored_answers_are_read(tmp_path, capsys):
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
        write_part(tmp_path / ROLLOUTS_FOLDER, table, step, step)
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
    line = (
        '{"pid": "1", "sample": 0, "answer": "5", "response": "\\\\boxed{5}", "n_tokens": 3, '
        '"finish_reason": "stop"}\n'
    )
    (tmp_path / "predictions.jsonl").write_text(line)
    assert main(["filter", "--attenuation", str(tmp_path)]) == 2
    assert "has 1 answers to a problem" in capsys.readouterr().err
