"""Runs side by side: tests of their differences by hand, the published rows marked, and unlike
things refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals.records import Graded, RowGrade
from adora_vl.evals.score_files import read_run
from adora_vl.evals.scoring.score import aggregate, verdict_of
from adora_vl.report.compare import main as gain
from eval.compare import main
from eval.suite import table_lines


def score_file(path: Path, right: str, benchmark: str = "mathvista", **fields: Any) -> str:
    graded = [
        Graded(str(i), RowGrade(verdict_of(hit == "1"), None, "r", {"task": ["ab"[i % 2]]}))
        for i, hit in enumerate(right)
    ]
    items = [{"pid": item.pid, "verdict": item.grade.verdict} for item in graded]
    score = (
        aggregate(graded)
        | {"benchmark": benchmark, "rules": {"rules": "vlmevalkit"}, "items": items}
        | fields
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(score))
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_the_difference_its_tests_and_the_groups(tmp_path, capsys):
    score_path = score_file(tmp_path / "one.json", "0" * 10 + "1" * 10)
    score_file(tmp_path / "two" / "score.json", "1" * 8 + "0" * 2 + "1" * 9 + "0")
    text = shown(capsys, score_path, str(tmp_path / "two"), "--by", "task")
    # 8 gained and 1 lost: 2 * (1 + 9) / 2^9.
    assert "+35.0 points" in text
    assert "McNemar p = 0.0391 (8 gained, 1 lost)" in text
    assert "50.0 [29.9, 70.1] of 20" in text
    assert text.index("task = a") < text.index("task = b")
    assert main([score_path, "--by", "tsk"]) == 2
    assert "no run has the group 'tsk'; they have task" in capsys.readouterr().err


def test_published_rows_are_there_and_marked_as_quoted(tmp_path, capsys):
    path = score_file(tmp_path / "one.json", "01")
    lines = shown(capsys, path).splitlines()
    adora = next(line for line in lines if line.startswith("ADORA (quoted)"))
    assert adora.split()[2] == "73.5"
    assert any("not measured here" in line for line in lines)
    assert "quoted" not in shown(capsys, path, "--no-published")
    mmstar = shown(capsys, score_file(tmp_path / "m.json", "01", "mmstar"))
    assert "GRPO (quoted)" in mmstar
    assert "Vision-R1" not in mmstar  # which has no MMStar figure


def test_what_is_published_of_geometry3k_stands_beside_its_whole_test_split_alone(tmp_path, capsys):
    def of(sources: list[str], count: int, split: str = "test", **fields: Any) -> str:
        data_set = {"sources": sources, "splits": [split], "problems": count}
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        return shown(capsys, score_file(file, "01", "geometry3k", data_set=data_set, **fields))

    assert "7B GRPO (quoted)" in of(["geometry3k"], 601)
    assert "7B GRPO (quoted)" in of(["geometry3k"], 598), "some golds nobody can meet"
    limited = {"answers": 598, "asked": 598, "in_data": 601}
    blank = {"fields": {"view": "blank"}}
    for text in (
        of(["synthetic"], 601),
        of(["mine"], 12),
        of(["geometry3k, redrawn"], 601),
        of(["geometry3k", "mine"], 613),
        of(["geometry3k"], 300),
        of(["geometry3k"], 601, "train"),
        of(["geometry3k"], 598, coverage=limited),
        of(["geometry3k"], 601, fingerprint=blank),
        shown(capsys, score_file(tmp_path / "none.json", "01", "geometry3k")),
        shown(capsys, score_file(tmp_path / "problems.json", "01", "problems")),
    ):
        assert "quoted" not in text


def test_problems_are_compared_under_both_names_of_their_grader(tmp_path, capsys):
    geometry_score = score_file(tmp_path / "one.json", "0110", "geometry3k")
    problems_score = score_file(tmp_path / "other.json", "0111", "problems")
    text = shown(capsys, geometry_score, problems_score)
    assert "4 common problems" in text
    assert "quoted" not in text


def test_what_makes_a_comparison_unfair_is_said(tmp_path, capsys):
    score_path = score_file(tmp_path / "one.json", "0110")
    official_score = score_file(tmp_path / "two.json", "01101", rules={"rules": "official"})
    text = shown(capsys, score_path, official_score)
    assert "4 common problems" in text
    assert "warning: the runs were scored by different rules" in text
    assert "score with --rules vlmevalkit to" in text
    assert "warning: the runs do not have the same problems" in text
    part = score_file(
        tmp_path / "part.json", "0110", coverage={"answers": 7, "asked": 40, "in_data": 40}
    )
    for text in (
        shown(capsys, part),
        shown(capsys, part, score_path),
        gained(capsys, part, score_path),
    ):
        assert "the score of a part: 7 of 40 answers are there" in text
    assert "of 7 of 40" in shown(capsys, part)


def test_a_score_of_a_part_says_so_wherever_it_is_shown(tmp_path, capsys):
    """A part is the first problems (`--limit`), or one of which nobody knows how many there are."""
    limited = {"answers": 4, "asked": 4, "in_data": 512}
    part = score_file(tmp_path / "part.json", "0110", coverage=limited)
    coverage = {"answers": 4, "asked": 4, "in_data": 4}
    whole_score = score_file(tmp_path / "one.json", "0110", coverage=coverage)
    note = "4 of the 512 answers to all the data (--limit)"
    for text in (
        shown(capsys, part),
        shown(capsys, whole_score, part),
        gained(capsys, whole_score, part),
    ):
        assert note in text
    (line,) = [
        row for row in shown(capsys, whole_score, part).splitlines() if row.startswith(part)
    ][:1]
    assert "of 4 of 512" in line
    assert "512" not in shown(capsys, whole_score)
    assert table_lines([read_run(part)])[1].endswith("(4 of 512)")
    assert table_lines([read_run(part)])[-1].endswith("(n of N): over a part of the problems")
    assert "(n of N)" not in table_lines([read_run(whole_score)])[-1]
    unknown = {"answers": 4, "asked": None, "in_data": None}
    alone = score_file(tmp_path / "alone.json", "0110", coverage=unknown)
    assert "it is not known of how many problems these are" in shown(capsys, alone)


def test_several_answers_have_columns_and_are_compared_by_their_share(tmp_path, capsys):
    items = [
        {"pid": pid, "sample": s, "verdict": v}
        for pid in "ab"
        for s, v in ((0, "correct"), (1, "wrong"))
    ]
    score_path = score_file(tmp_path / "one.json", "0101", items=items)
    two = score_file(
        tmp_path / "two.json", "0101", items=[item | {"verdict": "correct"} for item in items]
    )
    text = shown(capsys, score_path, two)
    assert "+50.0 points, 95 % [+50.0, +50.0] (paired bootstrap, 2 common problems)" in text
    assert "no McNemar" in text
    samples = {"k": 4, "avg@4": {"value": 0.5}, "pass@1": {"value": 0.5}, "pass@4": {"value": 0.75}}
    head, line = shown(capsys, score_file(tmp_path / "a.json", "01", samples=samples)).splitlines()[
        1:3
    ]
    assert head.split() == ["all", "avg@4", "pass@4"]
    assert line.split()[-2:] == ["50.0", "75.0"]


def test_what_is_no_score_is_named(case, tmp_path, capsys):
    for content, message in [
        (None, "is not a readable score file"),
        ("{", "is not a readable"),
        ("[]", "has no 'benchmark'"),
    ]:
        with case(content) as folder:
            if content is not None:
                (folder / "x.json").write_text(content)
            assert main([str(folder / "x.json")]) == 2
            assert message in capsys.readouterr().err
    code = main(
        [score_file(tmp_path / "a.json", "01"), score_file(tmp_path / "b.json", "01", "mmstar")]
    )
    assert code == 2
    assert "is of mmstar and" in capsys.readouterr().err


FIELDS = {
    "max_tokens": 48,
    "temperature": 0.0,
    "system_prompt": "Think.",
    "engine": "vllm",
    "dtype": "auto",
    "data_hash": "a",
    "split": "test",
    "min_pixels": None,
    "max_pixels": None,
    "samples": 1,
}
RESOLVED = {"dtype": "float32", "min_pixels": 3136, "max_pixels": 50_000}


def made_with(resolved: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "fingerprint": {
            "fields": {**FIELDS, **fields},
            "resolved": {**RESOLVED, **(resolved or {})},
        }
    }


def test_every_setting_that_differs_is_a_warning_here_and_in_the_gained(case, capsys):
    settings = [
        (name, made_with(None, **{name: "different"}))
        for name in [*FIELDS, "a setting of the future"]
    ]
    for name, fields in [*settings, *((name, made_with({name: "different"})) for name in RESOLVED)]:
        with case(name) as folder:
            score_path = score_file(folder / "one.json", "0110", **made_with())
            same = score_file(folder / "same.json", "0111", **made_with(model="another", seed=3))
            changed_score = score_file(folder / "other.json", "0111", **fields)
            for run in (
                lambda *files: shown(capsys, *files),
                lambda *files: gained(capsys, *files),
            ):
                assert "warning" not in run(score_path, same)
                warnings = [
                    line
                    for line in run(score_path, changed_score).splitlines()
                    if line.startswith("warning")
                ]
                assert len(warnings) == 1
                assert f"differ in {name}" in warnings[0]
                assert '"different"' in warnings[0]


# Seven of ten problems, twice; what is solved from words, from the picture and blindly decides what
# a model is called.
WORDS = "1111111000"


@pytest.mark.parametrize(
    ("text", "image", "blank", "verdict"),
    [
        (
            WORDS,
            "1111100000",
            "0100000000",
            "and loses more by reasoning: of 100 problems 20 by seeing",
        ),
        (WORDS, "0100000000", "0010000000", "it reasons and does not see"),
        ("0010000000", WORDS, "0100000000", "it sees and does not reason from words"),
        ("0010000000", "0100000000", "1000000000", "it does not reason: neither words nor picture"),
    ],
)
def test_four_views_say_whether_a_model_sees_or_reasons(
    tmp_path, capsys, text, image, blank, verdict
):
    text = 2 * text
    image = 2 * image
    blank = 2 * blank
    views = {"image": image, "text": text, "both": 2 * WORDS, "blank": blank}
    files = {
        name: score_file(
            tmp_path / f"{name}.json",
            right,
            **made_with(model="m", seed=len(name), **shown_how(name)),
        )
        for name, right in views.items()
    }
    lines = shown(capsys, *files.values())
    assert verdict in lines
    assert "20 common problems" in lines
    assert "differ in view" not in lines
    assert f"  text   {5 * text.count('1'):.1f} % (95 %" in lines
    assert "the picture adds +" in lines
    remains = 100 * blank.count("1") / image.count("1")
    assert f"without looking {remains:.1f} % (95 %: " in lines
    both = sum(a == b == "1" for a, b in zip(text, image, strict=True)) / text.count("1")
    assert f"of what it solves from words, it solves {100 * both:.1f} % (95 %" in lines
    two = shown(capsys, files["blank"], files["image"])
    versions = {"version": {"Text Lite": {"accuracy": 0.25}}}
    grey = score_file(
        tmp_path / "verse_blank.json",
        "01",
        "mathverse",
        groups=versions,
        **made_with(**shown_how("blank")),
    )
    with_image = score_file(
        tmp_path / "verse_image.json",
        "01",
        "mathverse",
        groups=versions,
        **made_with(**shown_how("image")),
    )
    assert "version = Text Lite" in shown(capsys, grey, with_image)
    assert "version =" not in shown(capsys, with_image)
    assert f"without looking {remains:.1f} %" in two
    assert verdict not in two
    another = score_file(tmp_path / "another.json", image, **made_with(model="n"))
    verdict = shown(capsys, another, files["blank"])
    assert "without looking" not in verdict
    assert "warning: the runs differ in view" in verdict
    assert "without looking" not in shown(capsys, files["blank"], files["blank"])


def shown_how(view: str) -> dict[str, Any]:
    return {} if view == "image" else {"view": view, **({} if view == "blank" else {"left_out": 2})}


TOOL: dict[str, Any] = {
    "tools": ["zoom"],
    "max_tool_calling_iterations": 2,
    "tool_options": {},
    "tool_files": {},
}


@pytest.mark.parametrize(
    ("won", "lost", "p", "gain"),  # p by hand: 2 * (1 + 9) / 2^9 and 2 * (1 + 4) / 2^4
    [
        (8, 1, 0.0391, "helps: 90.0 % right, 20.0 % without"),
        (1, 8, 0.0391, "harms"),
        (3, 1, 0.625, "shows no effect"),
    ],
)
def test_a_run_with_tools_and_one_without_say_what_the_tools_gain_and_harm(
    tmp_path, capsys, won, lost, p, gain
):
    right = "1" * won + "0" * lost + "1"
    same = dict[str, Any](model_hash="m")
    bare = score_file(tmp_path / "bare.json", "0" * won + "1" * lost + "1", **made_with(**same))
    zoom = score_file(tmp_path / "zoom.json", right, **made_with(seed=3, **same, **TOOL))
    for files in ((bare, zoom), (zoom, bare)):
        text = shown(capsys, *files)
        assert (
            f"gain {won} (solved only with zoom), harm {lost} (only without), McNemar p = {p}"
            in text
        )
        assert f"having zoom {gain}" in text
        assert "warning" not in text
    assert "warning: the runs differ in tools" in gained(
        capsys, bare, zoom
    )  # which does not say what tools gain
    for changed, warned in (
        (dict[str, Any](model_hash="n"), [*TOOL]),
        ({**same, "max_tokens": 9}, ["max_tokens"]),
    ):
        text = shown(
            capsys, bare, score_file(tmp_path / "other.json", right, **made_with(**TOOL, **changed))
        )
        assert [
            line.split()[5].strip(":") for line in text.splitlines() if "warning" in line
        ] == warned
        assert (f"having zoom {gain}" in text) is (warned == ["max_tokens"])


def gained(capsys: pytest.CaptureFixture[str], *files: str) -> str:
    assert gain(list(files)) == 0
    return capsys.readouterr().out
