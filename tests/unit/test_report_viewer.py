"""The page of a run, without a browser: the sentence, what is read, and that it is one file that asks for nothing."""

from __future__ import annotations

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from adora_vl.report.__main__ import main
from adora_vl.report.page import _SCRIPTS, _VIEWER
from adora_vl.report.run import load_run
from adora_vl.report.weight_reason import weight_reason
from adora_vl.rollout_log.parts import parts, read_parts, write_part
from tests.report_support import ATTACK, SETTINGS, attacked_page, make_page, write_run

GROUP = {"weight": 0.1, "tds": True, "pass_rate": 0.5, "longest_right": 18.0, "mean_wrong": 21.25, "equal": False}


@pytest.mark.parametrize(
    ("group", "settings", "sentence"),
    [
        ({}, {}, "Attenuated to 0.1: TDS, the longest right rollout (18 tokens) is not longer than the mean of the "
         "finished wrong ones (21.2 tokens)."),
        ({"weight": 1.0, "tds": False, "longest_right": 30.0}, {}, "Kept at weight 1: TAS, the longest right rollout "
         "(30 tokens) is longer than the mean of the finished wrong ones (21.2 tokens)."),
        ({"mean_wrong": None}, {}, "Attenuated to 0.1: TDS, every wrong rollout was cut off, so there is no finished "
         "wrong one to compare lengths with, which counts as failing."),
        ({"mean_wrong": None, "pass_rate": 1.0, "equal": True, "weight": 1.0, "tds": False},
         {"adora_empty_wrong": "keep"},
         "Kept at weight 1: TAS, all rollouts are right, so there is no finished wrong one to compare lengths with, "
         "which counts as holding. All rewards are equal, so every advantage is 0 and nothing is learned from it."),
        ({"pass_rate": 0.0, "weight": 1.0, "tds": False, "longest_right": None}, {},
         "Kept at weight 1: neither TAS nor TDS, since no rollout is right."),
        ({"pass_rate": 0.0, "longest_right": None}, {"adora_no_correct": "attenuate"},
         "Attenuated to 0.1: TDS, no rollout is right."),
        ({"pass_rate": 0.0, "weight": 2.0, "tds": False, "longest_right": None},
         {"adora_mode": "amplification", "adora_criteria": ["length", "difficulty"], "adora_combine": "any"},
         "Amplified to 2: TAS, no rollout is right, the pass rate 0% is at most tau 50%."),
        ({"pass_rate": 0.0, "weight": 1.0, "tds": False, "longest_right": None},
         {"adora_criteria": ["difficulty"], "adora_difficulty_needs_correct": True},
         "Kept at weight 1: neither TAS nor TDS, since no rollout is right."),
        ({"weight": 2.0, "tds": False}, {"adora_mode": "amplification", "adora_criteria": ["difficulty"]},
         "Amplified to 2: TAS, the pass rate 50% is at most tau 50%."),
        ({"weight": 1.0}, {"adora_mode": "off", "adora_criteria": ["difficulty"], "adora_tau": 0.25},
         "GRPO, weight 1; ADORA's criteria say TDS, the pass rate 50% is above tau 25%."),
        ({"weight": 1.0},
         {"adora_method_options": {"mode": "off"}, "adora_criteria": ["difficulty"], "adora_tau": 0.25},
         "GRPO, weight 1; ADORA's criteria say TDS, the pass rate 50% is above tau 25%."),
        ({"weight": 0.8}, {"adora_method": "daro", "adora_criteria": ["difficulty"], "adora_tau": 0.25},
         "DARO, weight 0.8; ADORA's criteria say TDS, the pass rate 50% is above tau 25%."),
        ({"weight": 0.5}, {"adora_mode": "something new"}, "Attenuated to 0.5."),
        ({"weight": None}, {}, "No weight is recorded."),
        ({}, {"adora_method_options": {"assign": "random"}}, "Attenuated to 0.1 by chance (assign: random); ADORA's "
         "criteria say TDS, the longest right rollout (18 tokens) is not longer than the mean of the finished wrong "
         "ones (21.2 tokens)."),
        ({"weight": 1.0}, {"adora_method_options": '{"adora": {"assign": "reversed"}}'}, "Kept at weight 1 as the "
         "criteria do not say (assign: reversed); ADORA's criteria say TDS, the longest right rollout (18 tokens) is "
         "not longer than the mean of the finished wrong ones (21.2 tokens)."),
        ({"weight": 1.0}, {"adora_method_options": {"assign": "rate"}}, "Kept at weight 1 with a scaled learning rate "
         "instead (assign: rate); ADORA's criteria say TDS, the longest right rollout (18 tokens) is not longer than "
         "the mean of the finished wrong ones (21.2 tokens)."),
    ],
)  # fmt: skip
def test_why_a_group_has_its_weight(group, settings, sentence):
    assert weight_reason({**GROUP, **group}, {**SETTINGS, **settings}) == sentence


@pytest.mark.parametrize(
    ("folder", "words"), [("none", "is no folder"), (".", "has neither metrics.jsonl nor rollouts/")]
)
def test_what_is_no_run_is_said_in_one_line(tmp_path, capsys, folder, words):
    assert main([str(tmp_path / folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: RUN: ") and words in error and error.count("\n") == 1


def test_a_damaged_record_and_a_strangers_file_are_the_users_to_see(tmp_path, capsys):
    run = write_run(tmp_path / "run", 1)
    (tmp_path / "mine.html").write_text("<h1>my thesis</h1>")
    assert main([str(run), "--output", str(tmp_path / "mine.html")]) == 2
    assert main([str(run), "--output", str(tmp_path / "no" / "folder.html")]) == 2
    next((run / "rollouts").glob("*.parquet")).write_bytes(b"PAR1 not a table PAR1")
    assert main([str(run)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.split(":")[1].strip() for error in errors] == ["--output", "--output", "RUN"]
    assert (tmp_path / "mine.html").read_text() == "<h1>my thesis</h1>"


def test_a_run_under_way_may_merge_its_files_while_it_is_read(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 31)
    listed = parts(run / "rollouts")
    write_part(run / "rollouts", read_parts(listed), 1, 31)
    for part in listed:
        part.path.unlink()
    answers = iter([listed])
    monkeypatch.setattr("adora_vl.report.run.parts", lambda folder: next(answers, None) or parts(folder))
    assert len(load_run(run, max_rollouts=1000).groups) == 62


def test_a_long_run_is_thinned_evenly_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", 20)
    view = load_run(run, max_rollouts=40)  # of 160
    assert [group["step"] for group in view.groups[::2]] == [1, 6, 11, 15, 20]
    assert view.notes == ["40 of 160 recorded rollouts are shown, those of 5 steps."]
    assert len(load_run(run, max_rollouts=1).groups) == 2


def test_diagrams_are_bounded_and_never_read_from_elsewhere(tmp_path, capsys):
    run = write_run(tmp_path / "run", 1)
    make_page(tmp_path / "page.html", run, words=("--max-image-mb", "0"))
    assert "1 diagrams are left out" in capsys.readouterr().out
    (tmp_path / "secret.png").write_bytes(b"secret")
    stranger = write_run(tmp_path / "stranger", 1, images=["../../../secret.png"])  # type: ignore[arg-type]
    assert base64.b64encode(b"secret").decode() not in json.dumps(unpacked(make_page(tmp_path / "s.html", stranger)))


def unpacked(page: Path) -> dict[str, Any]:
    """Both blocks of data."""
    blocks = re.findall(r'id="(?:data|texts)">([^<]*)<', page.read_text())
    both = [json.loads(gzip.decompress(base64.b64decode(block))) for block in blocks]
    return {**both[0], **both[1]}


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_self_contained(tmp_path):
    attacked = attacked_page(tmp_path)
    text = attacked.read_text()
    for _, attributes in Tags(text).tags:
        assert not [name for name in attributes if name.startswith("on")] and "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert ATTACK not in text and "<script>document" not in text and "<img" not in text
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}  # names, which nothing fetches
    assert set(re.findall(r"https?://[^\s\"']*", text)) <= namespaces
    assert unpacked(attacked)["runs"][0]["groups"][0]["id"] == ATTACK
    for name in _SCRIPTS:
        script = (_VIEWER / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser", script
        )
