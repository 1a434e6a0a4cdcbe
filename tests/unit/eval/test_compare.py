"""Runs side by side: tests of their differences by hand, the published rows marked, and unlike
things refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from adora_vl.evals.compare import comparability_warnings
from adora_vl.evals.records import CORRECT, WRONG, GradedAnswer, RowGrade
from adora_vl.evals.score_files import read_run
from adora_vl.evals.scoring.score import summarise_grades
from eval.compare import main
from eval.suite import table_lines


def write_score_file(
    path: Path, right_digits: str, benchmark: str = "mathvista", **fields: Any
) -> str:
    """Write a score file and return its path.

    `right_digits` has a character for each problem, `1` for a right answer; problems are in turn of
    the groups `a` and `b` of the kind `task`. `fields` are keys of the score, in place of its own.
    """
    graded = []
    for index, character in enumerate(right_digits):
        grade = RowGrade(
            verdict=CORRECT if character == "1" else WRONG,
            extracted=None,
            reason="r",
            groups={"task": ["ab"[index % 2]]},
        )
        graded.append(GradedAnswer(str(index), grade))
    items = [{"pid": item.pid, "verdict": item.grade.verdict} for item in graded]
    score = summarise_grades(graded)
    score |= {"benchmark": benchmark, "rules": {"rules": "vlmevalkit"}, "items": items}
    score |= fields
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(score))
    return str(path)


def comparison_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run `eval.compare` on these words, and return the text that it prints."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_difference_its_tests_and_the_groups(tmp_path, capsys):
    """A comparison has the difference of accuracy, McNemar's test, and figures by group.

    A group that no run has is refused.
    """
    first = write_score_file(tmp_path / "one.json", "0" * 10 + "1" * 10)
    write_score_file(tmp_path / "two" / "score.json", "1" * 8 + "0" * 2 + "1" * 9 + "0")
    second_folder = str(tmp_path / "two")
    text = comparison_of(capsys, first, second_folder, "--by", "task")
    # 8 gained and 1 lost, so 7 of 20 points more; McNemar's p is 2 * (1 + 9) / 2^9.
    assert "+35.0 points" in text
    assert "McNemar p = 0.0391 (8 gained, 1 lost)" in text
    assert "50.0 [29.9, 70.1] of 20" in text
    assert text.index("task = a") < text.index("task = b")
    assert main([first, "--by", "tsk"]) == 2
    assert "no run has the group 'tsk'; they have task" in capsys.readouterr().err


def test_every_run_has_its_gain_over_the_first_one_also_by_group(tmp_path, capsys):
    """A gain is in points, and stands behind each figure of a run that the first one has too."""
    score_before = write_score_file(tmp_path / "before.json", "0" * 20)
    score_after = write_score_file(tmp_path / "after.json", "10" * 10)  # the group `a` gained alone
    grpo = write_score_file(tmp_path / "grpo.json", "11" * 9 + "00")
    lines = comparison_of(
        capsys, score_before, score_after, grpo, "--by", "task", "--no-published"
    ).splitlines()
    assert lines[0].endswith(f"gain in points over {score_before}")
    assert lines[1].split() == ["all", "gain"]
    gain_by_heading: dict[str, dict[str, list[str]]] = {}
    heading = "all"
    for line in lines[2:]:
        words = line.split()
        if line.startswith("task = "):
            heading = line
        elif words and words[0] in (score_before, score_after, grpo) and " of " in line:
            # PATH ACCURACY [LOW, HIGH] of COUNT GAIN; the first run has no gain
            words_behind_count = words[words.index("of") + 2 :]
            gain_by_heading.setdefault(heading, {})[words[0]] = words_behind_count
    assert gain_by_heading == {
        "all": {score_before: [], score_after: ["+50.0"], grpo: ["+90.0"]},
        "task = a": {score_before: [], score_after: ["+100.0"], grpo: ["+90.0"]},
        "task = b": {score_before: [], score_after: ["+0.0"], grpo: ["+90.0"]},
    }
    bracket_positions = {line.index("[") for line in lines[2:5]}
    assert len(bracket_positions) == 1, "the cells of a column begin below each other"
    loss_lines = comparison_of(capsys, grpo, score_after).splitlines()
    assert loss_lines[3].endswith("-40.0")


def test_published_rows_are_there_and_marked_as_quoted(tmp_path, capsys):
    """Published figures stand below the measured ones, with the word `quoted`."""
    path = write_score_file(tmp_path / "one.json", "01")
    lines = comparison_of(capsys, path).splitlines()
    adora_line = next(line for line in lines if line.startswith("ADORA (quoted)"))
    assert adora_line.split()[2] == "73.5"  # its published accuracy on all of MathVista
    assert any("not measured here" in line for line in lines)
    assert "quoted" not in comparison_of(capsys, path, "--no-published")
    mmstar_text = comparison_of(capsys, write_score_file(tmp_path / "m.json", "01", "mmstar"))
    assert "GRPO (quoted)" in mmstar_text
    assert "Vision-R1" not in mmstar_text, "it has no MMStar figure"


def test_what_is_published_of_geometry3k_stands_beside_its_whole_test_split_alone(tmp_path, capsys):
    """Published figures of Geometry3K are quoted only beside a score of its whole test split.

    They are not beside a score of other data, of a part, or with grey pictures.
    """

    def comparison_with(sources: list[str], count: int, split: str = "test", **fields: Any) -> str:
        """Show a score of `count` problems from these sources."""
        data_set = {"sources": sources, "splits": [split], "problems": count}
        n_files = len(list(tmp_path.iterdir()))
        path = tmp_path / f"{n_files}.json"
        return comparison_of(
            capsys, write_score_file(path, "01", "geometry3k", data_set=data_set, **fields)
        )

    # Geometry3K's test split has 601 problems
    assert "7B GRPO (quoted)" in comparison_with(["geometry3k"], count=601)
    assert "7B GRPO (quoted)" in comparison_with(["geometry3k"], count=598), (
        "some references are unreadable"
    )
    # The command of this benchmark has two names.
    data_set = {"sources": ["geometry3k"], "splits": ["test"], "problems": 601}
    path = write_score_file(tmp_path / "same.json", "01", "problems", data_set=data_set)
    assert "7B GRPO (quoted)" in comparison_of(capsys, path)
    limited = {"answers": 598, "asked": 598, "in_data": 601}
    blank = {"fields": {"view": "blank"}}
    texts_without = [
        comparison_with(["synthetic"], count=601),
        comparison_with(["mine"], count=12),
        comparison_with(["geometry3k, redrawn"], count=601),
        comparison_with(["geometry3k", "mine"], count=613),
        comparison_with(["geometry3k"], count=300),
        comparison_with(["geometry3k"], count=601, split="train"),
        comparison_with(["geometry3k"], count=598, coverage=limited),
        comparison_with(["geometry3k"], count=601, fingerprint=blank),
        comparison_of(capsys, write_score_file(tmp_path / "none.json", "01", "geometry3k")),
        comparison_of(capsys, write_score_file(tmp_path / "problems.json", "01", "problems")),
    ]
    for text in texts_without:
        assert "quoted" not in text


def test_problems_are_compared_under_both_names_of_their_grader(tmp_path, capsys):
    """Scores of `geometry3k` and `problems` are compared, as two names of one benchmark.

    They have no published figures beside them, since their data are not known.
    """
    files = []
    for name, right_digits in (("geometry3k", "0110"), ("problems", "0111")):
        fingerprint = fingerprint_with(benchmark=name)
        files.append(write_score_file(tmp_path / f"{name}.json", right_digits, name, **fingerprint))
    text = comparison_of(capsys, *files)
    assert "4 common problems" in text
    assert "quoted" not in text
    assert "warning" not in text


def test_what_makes_a_comparison_unfair_is_said(tmp_path, capsys):
    """A comparison warns of other rules, of other problems and of missing answers.

    A score of 7 of 40 answers is one of a part, alone and beside another.
    """
    score_path = write_score_file(tmp_path / "one.json", "0110")
    official_score = write_score_file(tmp_path / "two.json", "01101", rules={"rules": "official"})
    text = comparison_of(capsys, score_path, official_score)
    assert "4 common problems" in text
    assert "warning: the runs were scored by different rules" in text
    assert "score with --rules vlmevalkit to" in text
    assert "warning: the runs do not have the same problems" in text
    coverage = {"answers": 7, "asked": 40, "in_data": 40}
    part = write_score_file(tmp_path / "part.json", "0110", coverage=coverage)
    texts = [comparison_of(capsys, part), comparison_of(capsys, part, score_path)]
    for text in texts:
        assert "the score of a part: 7 of 40 answers are there" in text
    assert "of 7 of 40" in comparison_of(capsys, part)


def test_a_score_of_a_part_says_so_wherever_it_is_shown(tmp_path, capsys):
    """A score of a part is marked in `eval.compare` and in the table of a suite.

    A part is the first problems (`--limit`), or one of which nobody knows how many there are.
    """
    limited = {"answers": 4, "asked": 4, "in_data": 512}
    part = write_score_file(tmp_path / "part.json", "0110", coverage=limited)
    coverage = {"answers": 4, "asked": 4, "in_data": 4}
    whole_score = write_score_file(tmp_path / "one.json", "0110", coverage=coverage)
    texts = [comparison_of(capsys, part), comparison_of(capsys, whole_score, part)]
    for text in texts:
        assert "4 of the 512 answers to all the data (--limit)" in text
    lines = comparison_of(capsys, whole_score, part).splitlines()
    first_line_of_part = next(line for line in lines if line.startswith(part))
    assert "of 4 of 512" in first_line_of_part
    assert "512" not in comparison_of(capsys, whole_score)
    suite_lines = table_lines([read_run(part)])
    assert suite_lines[1].endswith("(4 of 512)")
    assert suite_lines[-1].endswith("(n of N): over a part of the problems")
    assert "(n of N)" not in table_lines([read_run(whole_score)])[-1]
    unknown = {"answers": 4, "asked": None, "in_data": None}
    unknown_score = write_score_file(tmp_path / "alone.json", "0110", coverage=unknown)
    assert "it is not known of how many problems these are" in comparison_of(capsys, unknown_score)


def test_several_answers_have_columns_and_are_compared_by_their_share(tmp_path, capsys):
    """A problem with several answers counts as the share that is right, and avg@k gets a column."""
    half_right = []
    for pid in ("a", "b"):
        half_right.append({"pid": pid, "sample": 0, "verdict": "correct"})
        half_right.append({"pid": pid, "sample": 1, "verdict": "wrong"})
    all_right = [{**item, "verdict": "correct"} for item in half_right]
    half_score = write_score_file(tmp_path / "one.json", "0101", items=half_right)
    full_score = write_score_file(tmp_path / "two.json", "0101", items=all_right)
    text = comparison_of(capsys, half_score, full_score)
    # In both problems 1 of 2 answers is gained; two equal differences are little evidence.
    assert "+50.0 points, 95 % [-48.6, +82.9] (paired, 2 common problems)" in text
    assert "no McNemar" in text
    samples = {
        "k": 4,
        "avg@4": {"value": 0.5, "interval_95": [0.25, 0.7]},
        "pass@1": {"value": 0.5, "interval_95": [0.25, 0.7]},
        "pass@4": {"value": 0.75, "interval_95": [0.5, 1.0]},
    }
    sampled_score = write_score_file(tmp_path / "a.json", "01", samples=samples)
    caption, head, line = comparison_of(capsys, sampled_score).splitlines()[:3]
    assert caption == "mathvista: accuracy in %, [95 % interval], answers"
    assert head.split() == ["all", "avg@4", "pass@4"]
    assert line.endswith("50.0 [25.0, 70.0]   75.0 [50.0, 100.0]")


def test_what_is_no_score_is_named(case_folder, tmp_path, capsys):
    """A file that is no score, and scores of two benchmarks, are refused with one line."""
    cases = [
        (None, "is not there; name the --output of an evaluation"),  # there is no file
        ("{", "is not a readable"),
        ("[]", "has no 'benchmark'"),
    ]
    for content, message in cases:
        with case_folder(content) as folder:
            path = folder / "x.json"
            if content is not None:
                path.write_text(content)
            assert main([str(path)]) == 2
            assert message in capsys.readouterr().err
    mathvista_score = write_score_file(tmp_path / "a.json", "01")
    mmstar_score = write_score_file(tmp_path / "b.json", "01", "mmstar")
    assert main([mathvista_score, mmstar_score]) == 2
    assert "is of mmstar and" in capsys.readouterr().err


# The parts `fields` and `resolved` of a fingerprint, as most runs of these tests have them.
USUAL_FIELDS = {
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
USUAL_RESOLVED_SETTINGS = {"dtype": "float32", "min_pixels": 3136, "max_pixels": 50_000}


def fingerprint_with(resolved: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the fingerprint of a score, as its key: the usual one, with some values changed.

    `fields` are options as given, and `resolved` settings that the engine has found.
    """
    return {
        "fingerprint": {
            "fields": {**USUAL_FIELDS, **fields},
            "resolved": {**USUAL_RESOLVED_SETTINGS, **(resolved or {})},
        }
    }


def test_every_setting_that_differs_is_a_warning_here_and_in_the_gained(case_folder, capsys):
    """Two runs that differ in a setting are warned of; only model and seed may differ.

    `comparability_warnings`, which the comparison of trainings uses too, has the same line.
    """
    changed_fingerprints = {}
    for name in [*USUAL_FIELDS, "a setting of the future"]:
        fields: dict[str, Any] = {name: "different"}
        changed_fingerprints[name] = fingerprint_with(**fields)
    changed_resolved = {
        name: fingerprint_with({name: "different"}) for name in USUAL_RESOLVED_SETTINGS
    }
    cases = [*changed_fingerprints.items(), *changed_resolved.items()]
    for name, fingerprint in cases:
        with case_folder(name) as folder:
            first = write_score_file(folder / "one.json", "0110", **fingerprint_with())
            same = write_score_file(
                folder / "same.json", "0111", **fingerprint_with(model="another", seed=3)
            )
            other_score = write_score_file(folder / "other.json", "0111", **fingerprint)
            assert "warning" not in comparison_of(capsys, first, same)
            assert comparability_warnings([read_run(first), read_run(same)]) == []
            lines = comparison_of(capsys, first, other_score).splitlines()
            (warning,) = [line for line in lines if line.startswith("warning")]
            assert f"differ in {name}" in warning
            assert '"different"' in warning
            assert comparability_warnings([read_run(first), read_run(other_score)]) == [warning]


def test_a_setting_that_one_score_does_not_have_is_no_difference(tmp_path):
    """A program of the server that one score does not know, or another address, is no difference.

    Two programs that are both known and differ are one.
    """
    unknown = fingerprint_with({"base_url": "http://a:1/v1"})
    vllm = fingerprint_with({"base_url": "http://b:2/v1", "server": "vllm"})
    sglang = fingerprint_with({"base_url": "http://b:2/v1", "server": "sglang"})
    runs = [
        read_run(write_score_file(tmp_path / f"{name}.json", "0110", **fingerprint))
        for name, fingerprint in (("unknown", unknown), ("vllm", vllm), ("sglang", sglang))
    ]
    assert comparability_warnings(runs[:2]) == []
    (warning,) = comparability_warnings(runs[1:])
    assert "differ in server" in warning


# Ten problems, with a 1 for each that is solved.
MANY_RIGHT = "1111111000"


@pytest.mark.parametrize(
    ("text", "image", "blank", "verdict"),
    [
        (
            MANY_RIGHT,
            "1111100000",
            "0100000000",
            "and loses more by reasoning: of 100 problems 20 by seeing",
        ),
        (MANY_RIGHT, "0100000000", "0010000000", "it reasons and does not see"),
        ("0010000000", MANY_RIGHT, "0100000000", "it sees and does not reason from words"),
        ("0010000000", "0100000000", "1000000000", "it does not reason: neither words nor picture"),
    ],
)
def test_four_views_say_whether_a_model_sees_or_reasons(
    tmp_path, capsys, text, image, blank, verdict
):
    """The verdict says whether a model sees and reasons, by what it solves in the views.

    `text`, `image` and `blank` have a digit for each of ten problems, 1 where it is solved from
    words, from the picture, and from a grey picture.
    """
    # Each pattern twice, so that the differences are significant.
    text = 2 * text
    image = 2 * image
    blank = 2 * blank
    right_by_view = {"image": image, "text": text, "both": 2 * MANY_RIGHT, "blank": blank}
    files = write_view_scores(tmp_path, right_by_view)
    lines = comparison_of(capsys, *files.values())
    assert verdict in lines
    assert "20 common problems" in lines
    assert "differ in view" not in lines
    assert f"  text   {5 * text.count('1'):.1f} % (95 %" in lines
    assert "the picture adds +" in lines
    remaining = 100 * blank.count("1") / image.count("1")
    assert f"without looking {remaining:.1f} % (95 %: " in lines
    solved_in_both_views = [
        in_words == in_picture == "1" for in_words, in_picture in zip(text, image, strict=True)
    ]
    percent_from_picture = 100 * sum(solved_in_both_views) / text.count("1")
    assert f"of what it solves from words, it solves {percent_from_picture:.1f} % (95 %" in lines
    two_views = comparison_of(capsys, files["blank"], files["image"])
    assert f"without looking {remaining:.1f} %" in two_views
    assert verdict not in two_views, "it needs three views"


def test_only_views_of_one_model_are_compared_as_views(tmp_path, capsys):
    """Views of two models, and one view twice, have no sentence on guessing without looking."""
    files = write_view_scores(tmp_path, {"image": 2 * MANY_RIGHT, "blank": "0" * 20})
    other_model = write_score_file(
        tmp_path / "other.json", 2 * MANY_RIGHT, **fingerprint_with(model="n")
    )
    text = comparison_of(capsys, other_model, files["blank"])
    assert "without looking" not in text
    assert "warning: the runs differ in view" in text
    assert "without looking" not in comparison_of(capsys, files["blank"], files["blank"])


def test_views_of_mathverse_come_with_its_own_versions(tmp_path, capsys):
    """A comparison of two views of MathVerse has its versions too; one score alone has not."""
    groups = {"version": {"Text Lite": {"accuracy": 0.25}}}
    files = []
    for view in ("blank", "image"):
        fingerprint = fingerprint_with(**fields_of_view(view))
        path = tmp_path / f"{view}.json"
        files.append(write_score_file(path, "01", "mathverse", groups=groups, **fingerprint))
    assert "version = Text Lite" in comparison_of(capsys, *files)
    assert "version =" not in comparison_of(capsys, files[1])


def write_view_scores(folder: Path, right_by_view: dict[str, str]) -> dict[str, str]:
    """Write the score of one model in each view, and return the paths by view.

    `right_by_view`: for each view a text with a character for each problem, 1 where it is right.
    """
    files = {}
    for view, right_digits in right_by_view.items():
        # A seed of its own for each view: it may differ in a comparison of views.
        fingerprint = fingerprint_with(model="m", seed=len(view), **fields_of_view(view))
        files[view] = write_score_file(folder / f"{view}.json", right_digits, **fingerprint)
    return files


def fields_of_view(view: str) -> dict[str, Any]:
    """Return the fields of a fingerprint by which a view is known; `image` has none.

    The views with facts in words leave out problems.
    """
    if view == "image":
        return {}
    if view == "blank":
        return {"view": view}
    return {"view": view, "left_out": 2}


# The fields of a fingerprint that a run with tools has besides.
TOOL_FIELDS: dict[str, Any] = {
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
    """`won` problems are solved only with tools, `lost` only without, and one by both."""
    right_without = "0" * won + "1" * lost + "1"
    right_with = "1" * won + "0" * lost + "1"
    without_tools = write_score_file(
        tmp_path / "bare.json", right_without, **fingerprint_with(model_hash="m")
    )
    with_tools = write_score_file(
        tmp_path / "zoom.json",
        right_with,
        **fingerprint_with(seed=3, model_hash="m", **TOOL_FIELDS),
    )
    for files in ((without_tools, with_tools), (with_tools, without_tools)):
        text = comparison_of(capsys, *files)
        counts = f"gain {won} (solved only with zoom), harm {lost} (only without)"
        assert f"{counts}, McNemar p = {p}" in text
        assert f"having zoom {gain}" in text
        assert "warning" not in text
    # The comparison of trainings does not say what tools gain.
    cautions = comparability_warnings([read_run(without_tools), read_run(with_tools)])
    assert any("the runs differ in tools" in line for line in cautions)
    # Another model is no comparison of tools, and another setting is one with a warning.
    other_model = fingerprint_with(model_hash="n", **TOOL_FIELDS)
    other_limit = fingerprint_with(model_hash="m", max_tokens=9, **TOOL_FIELDS)
    for fingerprint, warned_fields, is_about_tools in (
        (other_model, [*TOOL_FIELDS], False),
        (other_limit, ["max_tokens"], True),
    ):
        other = write_score_file(tmp_path / "other.json", right_with, **fingerprint)
        text = comparison_of(capsys, without_tools, other)
        warnings = [line for line in text.splitlines() if "warning" in line]
        # FIELD of `warning: the runs differ in FIELD: ...`
        assert [warning.split()[5].strip(":") for warning in warnings] == warned_fields
        assert (f"having zoom {gain}" in text) is is_about_tools
