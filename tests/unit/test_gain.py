"""The demo's last table: before and after training, and another way of training beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.report.gain import main
from eval.geometry3k.benchmark import BENCHMARK
from eval.scoring import Graded, aggregate
from eval.statistics import bootstrap, wilson

STORED = {"date": "2026-01-31", "command": "accelerate launch --adora_mode off", "versions": {"trl": "1.16.0"}}
ROOT = Path(__file__).parents[2]


def score_file(path: Path, right: str, **more: Any) -> str:
    """Problems of the kinds vertical and supplementary in turn; `right` has a 1 for each right answer."""
    graded = [
        Graded(
            str(number), "correct" if hit == "1" else "wrong", None, "r",
            groups={"family": ["crossing"], "kind": [f"crossing, {('supplementary', 'vertical')[number % 2]}"]},
        )
        for number, hit in enumerate(right)
    ]  # fmt: skip
    items = [{"pid": item.pid, "verdict": item.verdict} for item in graded]
    path.write_text(json.dumps(aggregate(graded) | {"benchmark": BENCHMARK.name, "items": items} | more))
    return str(path)


def interval(correct: int, total: int) -> str:
    low, high = wilson(correct, total)
    return f"{100 * correct / total:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def test_what_stands_beside_gets_a_column_a_paired_difference_and_its_origin(tmp_path, capsys):
    before = score_file(tmp_path / "before.json", "0" * 20)
    after = score_file(tmp_path / "after.json", "10" * 10)  # supplementary kept, vertical lost
    grpo = score_file(tmp_path / "grpo.json", "11" * 9 + "00", stored=STORED)
    assert main([before, after, "--beside", f"GRPO={grpo}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("GRPO [95 %]")
    rows = {line.split("%")[0].split()[0]: line for line in lines[1:5]}
    assert list(rows) == ["all", "crossing", "supplementary", "vertical"]
    for name, figures in {
        "all": (0, 10, 18, 20), "crossing": (0, 10, 18, 20), "supplementary": (0, 10, 9, 10), "vertical": (0, 0, 9, 10)
    }.items():  # fmt: skip
        found = [rows[name].index(interval(correct, figures[-1])) for correct in figures[:3] if correct]
        assert found == sorted(found), name
    low, high = bootstrap([0.0, -1.0] * 9 + [1.0, 0.0])
    assert f"after - GRPO: -40.0 points, 95 % [{100 * low:+.1f}, {100 * high:+.1f}]" in "\n".join(lines)
    said = "\n".join(lines)
    assert "GRPO was not run now: it is stored, of 2026-01-31, with trl 1.16.0, by\n" in said
    assert "  accelerate launch --adora_mode off" in said


def test_a_score_that_was_run_now_is_not_called_stored_and_one_without_items_has_no_difference(tmp_path, capsys):
    before, after = (score_file(tmp_path / name, right) for name, right in (("b", "0011"), ("a", "0111")))
    assert main([before, after, "--beside", f"GRPO={score_file(tmp_path / 'g', '1111')}"]) == 0
    printed = capsys.readouterr().out
    assert "after - GRPO: -25.0 points" in printed and "stored" not in printed
    assert main([before, after, "--beside", f"GRPO={score_file(tmp_path / 'g', '1111', items=[])}"]) == 0
    printed = capsys.readouterr().out
    assert "after - GRPO" not in printed and "100.0 %" in printed
    assert "before and GRPO do not have the same problems" in printed


def test_a_stored_score_is_held_against_the_problems_and_the_settings_not_the_bytes_of_the_data(tmp_path, capsys):
    def made(data_hash: str, tokens: int) -> dict[str, Any]:
        return {"fingerprint": {"fields": {"data_hash": data_hash, "max_tokens": tokens}, "resolved": {}}}

    def warnings(right: str, **more: Any) -> list[str]:
        beside = score_file(tmp_path / "g", right, **more)
        assert main([before, before, "--beside", f"GRPO={beside}"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]

    before = score_file(tmp_path / "b", "0011", **made("one", 48))
    assert not warnings("0111", stored=STORED, **made("two", 48))
    (warning,) = warnings("0111", **made("two", 48))  # not stored: then other bytes are other data
    assert "data_hash" in warning
    (warning,) = warnings("0111", stored=STORED, **made("two", 40))
    assert "max_tokens" in warning
    groups = json.loads(Path(before).read_text())["groups"]
    groups["kind"]["crossing, vertical"]["total"] += 1
    (warning,) = warnings("0111", stored=STORED, groups=groups, **made("two", 48))
    assert "do not have the same problems" in warning


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("score.json", "is not NAME=FILE, such as GRPO=score.json"),
        ("=score.json", "is not NAME=FILE"),
        ("GRPO=nowhere.json", "nowhere.json: not a readable score file"),
        ("GRPO={short}", "before has 4 answers and GRPO 2"),
        ("GRPO={other}", "before is of geometry3k and GRPO of mmstar"),
    ],
)
def test_what_cannot_stand_beside_is_the_users_mistake(beside, expected, tmp_path, capsys):
    before = score_file(tmp_path / "b", "0011")
    files = {"short": score_file(tmp_path / "s", "01"), "other": score_file(tmp_path / "o", "0011", benchmark="mmstar")}
    assert main([before, before, "--beside", beside.format(**files)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and expected in error


def test_the_stored_score_of_the_demo_says_how_it_was_made():
    stored = json.loads((ROOT / "benchmarks" / "stored" / "demo_grpo.json").read_text())
    assert "--config configs/train/smoke_cpu.yaml" in stored["stored"]["command"]
    assert "--adora_mode off" in stored["stored"]["command"] and stored["stored"]["versions"].keys() >= {"torch", "trl"}
    assert sum(item["verdict"] == "correct" for item in stored["items"]) == stored["correct"]
    assert len({item["pid"] for item in stored["items"]}) == stored["total"] == 600
    assert f"--max-tokens {stored['fingerprint']['fields']['max_tokens']}" in (ROOT / "setup" / "demo.sh").read_text()
