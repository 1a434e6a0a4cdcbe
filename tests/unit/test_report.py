"""What a person reads at the end."""

from __future__ import annotations

import json

import pytest
import torch

from adora_vl.advantage import weigh_groups
from adora_vl.config import AdoraGRPOConfig
from adora_vl.report.gain import main
from adora_vl.report.summary import summary_lines
from adora_vl.rollout_log.figures import adora_metrics


def score(correct, total, low, high):
    cell = {"correct": correct, "total": total, "accuracy": correct / total, "wilson_95": [low, high]}
    return {**cell, "groups": {"family": {"circle": cell}}}


def test_the_gain_says_whether_the_intervals_overlap(tmp_path, capsys):
    files = []
    for name, content in (("b", score(30, 100, 0.22, 0.40)), ("a", score(60, 100, 0.50, 0.69))):
        (tmp_path / name).write_text(json.dumps(content))
        files.append(str(tmp_path / name))
    assert main(files) == 0
    printed = capsys.readouterr().out
    assert "30.0 % [22.0, 40.0]" in printed and "60.0 % [50.0, 69.0]" in printed and "+30.0" in printed
    assert "do not overlap" in printed
    assert main([files[0], files[0]]) == 0
    assert "intervals overlap" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["nowhere.json", "nowhere.json"]])
def test_a_missing_score_file_is_the_users_mistake(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_different_problem_sets_are_not_compared(tmp_path, capsys):
    for name, total in (("b", 100), ("a", 50)):
        (tmp_path / name).write_text(json.dumps(score(10, total, 0.1, 0.2)))
    assert main([str(tmp_path / "b"), str(tmp_path / "a")]) == 2
    assert "100" in capsys.readouterr().err


def test_the_metrics_of_a_batch_by_hand():
    rewards = torch.tensor([[1.0, 0.1], [1.0, 1.0], [0.1, 0.0], [1.0, 0.1]])
    lengths = torch.tensor([[9, 5], [4, 4], [7, 7], [6, 100]])
    metrics = adora_metrics(weigh_groups(rewards, lengths, truncated_at=100))
    assert metrics == pytest.approx(
        {
            "tds_share": 0.5,  # all correct, and every wrong one truncated
            "weight_mean": (1 + 0.1 + 1 + 0.1) / 4,
            "no_correct_share": 0.25,
            "all_correct_share": 0.25,
            "wrong_all_truncated_share": 0.25,
            "length_correct": (9 + 4 + 4 + 6) / 4,
            "length_wrong": (5 + 7 + 7 + 100) / 4,
            "pass_rate": (0.5 + 1 + 0 + 0.5) / 4,
        }
    )
    none_correct = adora_metrics(weigh_groups(rewards[2:3], lengths[2:3]))
    assert none_correct["length_correct"] != none_correct["length_correct"]  # NaN, which TRL leaves out of its log


def test_the_summary_compares_the_first_and_the_last_fifth(tmp_path):
    config = AdoraGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    history = [{"step": i, "reward": i / 10, "adora/drift": 1e-6} for i in range(10)] + [{"train_runtime": 1.0}]
    text = "\n".join(summary_lines(history, config, tmp_path / "merged", 90))
    assert "Trained 9 steps in 1.5 min" in text
    assert "reward                     0.050       0.850" in text
    assert "engine drift" in text and "TDS" not in text  # only what was logged
    assert f"--model {tmp_path / 'merged'} " in text
    assert "Trained 0 steps" in "\n".join(summary_lines([], config, tmp_path, 1))


def test_a_run_shorter_than_its_logging_interval_still_shows_its_figures(tmp_path):
    """`Trainer` then logs once, at the end, and everything stands in that entry."""
    config = AdoraGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    history = [{"step": 2, "train_runtime": 1.0, "reward": 0.25}, {"step": 2, "eval_reward": 0.75}]
    text = "\n".join(summary_lines(history, config, tmp_path / "merged", 90))
    assert "Trained 2 steps" in text and "reward                     0.250       0.250" in text and "0.75" not in text
