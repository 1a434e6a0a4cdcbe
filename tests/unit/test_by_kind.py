"""The tables by kind of problem that stand beside a comparison of runs."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq

from adora_vl.report.gain import main as gain
from benchmarks.by_kind import accuracy_table, attenuated, store
from eval.scoring import Graded, aggregate

KINDS = {"0": "crossing, vertical", "1": "crossing, vertical", "2": "circle, diameter"}


def score(right: str):
    graded = [
        Graded(pid, "correct" if hit == "1" else "wrong", None, "r", groups={"kind": [KINDS[pid]]})
        for pid, hit in zip(KINDS, right, strict=True)
    ]
    items = [{"pid": item.pid, "verdict": item.verdict, "extracted": "5", "reason": "r"} for item in graded]
    return {**aggregate(graded), "benchmark": "geometry3k", "items": items}


def test_only_mixed_groups_count_and_each_once(tmp_path):
    """Of groups with right and wrong rollouts; each has two rollouts here, in two files."""
    groups = [
        (1, 0, "0", True, (1.0, 0.1)),
        (1, 1, "1", False, (1.0, 0.0)),
        (1, 2, "2", True, (1.0, 1.0)),  # all right: no gradient, whatever its weight
        (2, 0, "2", False, (0.1, 0.0)),  # all wrong
        (2, 1, "0", True, (0.1, 1.0)),
    ]
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        rows = [
            {"step": at, "group": group, "id": row, "tds": tds, "reward": reward}
            for at, group, row, tds, rewards in groups if at == step for reward in rewards
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rollouts" / f"step-{step}.parquet")
    assert attenuated(tmp_path, KINDS) == {"crossing, vertical": (2, 3)}


def test_accuracy_is_the_mean_over_seeds_with_its_range():
    lines = accuracy_table(score("000"), {"grpo": [score("110"), score("111")], "adora": [score("011")]})
    rows = {line[:28].strip(): " ".join(line[28:].split()) for line in lines[1:]}
    assert rows["all"] == "3 0.0 83.3 (66.7 to 100.0) 66.7 (66.7 to 66.7)"
    assert rows["crossing, vertical"] == "2 0.0 100.0 (100.0 to 100.0) 50.0 (50.0 to 50.0)"
    assert rows["circle, diameter"] == "1 0.0 50.0 (0.0 to 100.0) 100.0 (100.0 to 100.0)"


def test_a_stored_score_can_stand_beside_others_and_holds_no_answers(tmp_path, capsys):
    (tmp_path / "run" / "eval").mkdir(parents=True)
    path = tmp_path / "run" / "eval" / "score.json"
    fields = {"fields": {"model": str(tmp_path / "run"), "max_tokens": 48}}
    path.write_text(json.dumps(score("110") | {"fingerprint": fields}))
    manifest = {"command": "train it", "finished": "2026-01-31T10:00:00", "versions": {"trl": "1.16.0", "python": "3"}}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    store(tmp_path / "run", tmp_path / "stored" / "grpo.json")
    assert gain([str(path), str(path), "--beside", f"GRPO={tmp_path / 'stored' / 'grpo.json'}"]) == 0
    printed = capsys.readouterr().out
    assert "stored, of 2026-01-31, with trl 1.16.0, by\n  train it" in printed and "+0.0 points" in printed
    stored = (tmp_path / "stored" / "grpo.json").read_text()
    assert "extracted" not in stored and str(tmp_path) not in stored and '"max_tokens": 48' in stored
