"""The page of a run without a browser: what it says, the formulas in it, and that no text does
anything.
"""

import base64
import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.record.phases import PHASES
from adora_vl.record.record_files import list_record_files, read_record_files, write_record_file
from adora_vl.report import page as module
from adora_vl.report.__main__ import main
from adora_vl.report.page import (
    _SCRIPT_FILES,
    _VIEWER_FOLDER,
    build_page,
    convert_formulas,
    latex_to_mathml,
)
from adora_vl.report.run_view import ROLLOUT_FIELDS, load_run
from adora_vl.report.weight_reason import weight_reason
from tests.support.browser import TagsOfPage
from tests.support.recorded_runs import (
    ADORA_SETTINGS,
    ATTACKING_HTML,
    write_attacked_page,
    write_recorded_run,
    write_report_page,
)

ATTENUATED_GROUP = {
    "step": 6,
    "weight": 0.1,
    "tds": True,
    "pass_rate": 0.5,
    "longest_right": 18.0,
    "mean_wrong": 21.25,
    "equal": False,
    "learned": False,
    "left": 0,
    "size": 4,
}


# changes of `ATTENUATED_GROUP`, changes of the settings of the run, the sentence about the weight
CHANGED_GROUP_AND_REASON: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {},
        {},
        "Attenuated to 0.1: TDS, the longest right rollout is not longer than the mean of the "
        "finished wrong ones.",
    ),
    (
        {"weight": 1.0, "tds": False, "longest_right": 30.0},
        {},
        "Kept at weight 1: TAS, the longest right rollout "
        "is longer than the mean of the finished wrong ones.",
    ),
    (
        {"longest_right": 21.25},
        {},
        "Attenuated to 0.1: TDS, the longest right rollout is as long as the mean "
        "of the finished wrong ones, which counts as failing.",
    ),
    (
        {"longest_right": 21.25, "weight": 1.0, "tds": False},
        {"adora_method": {"adora": {"ties": "keep"}}},
        "Kept at weight 1: TAS, the longest right rollout is as long as the mean of the finished "
        "wrong ones, which counts as holding.",
    ),
    (
        {"mean_wrong": None},
        {},
        "Attenuated to 0.1: TDS, every wrong rollout was cut off, so there is no finished "
        "wrong one to compare lengths with, which counts as failing.",
    ),
    (
        {"mean_wrong": None, "pass_rate": 1.0, "equal": True, "weight": 1.0, "tds": False},
        {"adora_method": {"adora": {"empty_wrong": "keep"}}},
        "Kept at weight 1: TAS, all rollouts are right, so there is no finished wrong one to "
        "compare lengths with, which counts as holding. All rewards are equal, so every advantage "
        "is 0 and nothing is learned from it.",
    ),
    (
        {"pass_rate": 0.0, "weight": 1.0, "tds": False, "longest_right": None},
        {},
        "Kept at weight 1: neither TAS nor TDS, since no rollout is right.",
    ),
    (
        {"pass_rate": 0.0, "longest_right": None},
        {"adora_method": {"adora": {"no_correct": "attenuate"}}},
        "Attenuated to 0.1: TDS, no rollout is right.",
    ),
    (
        {"pass_rate": 0.0, "weight": 2.0, "tds": False, "longest_right": None},
        {
            "adora_method": {
                "adora": {
                    "mode": "amplification",
                    "criteria": ["length", "difficulty"],
                    "combine": "any",
                }
            }
        },
        "Amplified to 2: TAS, no rollout is right, the pass rate is at most tau, 50 %.",
    ),
    (
        {"pass_rate": 0.0, "weight": 1.0, "tds": False, "longest_right": None},
        {"adora_method": {"adora": {"criteria": ["difficulty"], "needs_correct": True}}},
        "Kept at weight 1: neither TAS nor TDS, since no rollout is right.",
    ),
    (
        {"weight": 2.0, "tds": False},
        {"adora_method": {"adora": {"mode": "amplification", "criteria": ["difficulty"]}}},
        "Amplified to 2: TAS, the pass rate is at most tau, 50 %.",
    ),
    (
        {"weight": 1.0},
        {"adora_method": {"adora": {"mode": "off", "criteria": ["difficulty"], "tau": 0.25}}},
        "GRPO, weight 1; ADORA's criteria say TDS, the pass rate is above tau, 25 %.",
    ),
    (
        {"weight": 0.8},
        {
            "adora_method": {
                "daro": {},
                "adora": {"mode": "off", "criteria": ["difficulty"], "tau": 0.25},
            }
        },
        "DARO, weight 0.8; ADORA's criteria say TDS, the pass rate is above tau, 25 %.",
    ),
    (
        {},
        {
            "adora_method": {
                "adora": {
                    "criteria": ["difficulty"],
                    "tau": {"start": 0.5, "end": 0.3, "shape": "linear", "steps": [0, 10]},
                }
            }
        },
        "Attenuated to 0.1: TDS, the pass rate is above tau, 40 %.",
    ),
    ({"weight": None}, {}, "No weight is recorded."),
    (
        {"weight": None, "left": 1},
        {},
        "No weight is recorded. 1 of 4 rollouts have no reward, and count nowhere.",
    ),
    (
        {"left": 4, "equal": True},
        {},
        "No rollout of the group has a reward to compare with another, so nothing is "
        "learned from it.",
    ),
    (
        {"equal": True, "learned": True, "weight": 1.0, "tds": False, "longest_right": 30.0},
        {},
        "Kept at weight 1: TAS, the longest right rollout is longer than the mean of the finished "
        "wrong ones. All rewards are equal, but the run's method learns from it too.",
    ),
    (
        {},
        {"adora_method": {"adora": {"assign": "random"}}},
        "Attenuated to 0.1 by chance (assign: random); ADORA's criteria say TDS, the longest "
        "right rollout is not longer than the mean of the finished wrong ones.",
    ),
    (
        {"weight": 1.0},
        {"adora_method": {"adora": {"assign": "reversed"}}},
        "Kept at weight 1 as the criteria do not say (assign: reversed); ADORA's criteria say "
        "TDS, the longest right rollout is not longer than the mean of the finished wrong ones.",
    ),
    (
        {"weight": 1.0},
        {"adora_method": {"adora": {"assign": "rate"}}},
        "Kept at weight 1 with a scaled learning rate instead (assign: rate); ADORA's criteria "
        "say TDS, the longest right rollout is not longer than the mean of the finished wrong "
        "ones.",
    ),
]


def test_why_a_group_has_its_weight():
    for changed_group, changed_settings, sentence in CHANGED_GROUP_AND_REASON:
        group = {**ATTENUATED_GROUP, **changed_group}
        assert weight_reason(group, {**ADORA_SETTINGS, **changed_settings}) == sentence


def test_what_is_no_run_is_said_in_one_line(tmp_path, capsys):
    """A folder that is not there, and one without a file of a run, are refused in one line."""
    for folder, words in (
        ("none", "is no folder"),
        (".", "has neither metrics.jsonl nor rollouts/"),
    ):
        assert main([str(tmp_path / folder)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: RUN: ")
        assert words in error
        assert error.count("\n") == 1


def test_a_damaged_record_and_a_strangers_file_are_the_users_to_see(tmp_path, capsys):
    """A page is not written over another file, and a damaged file is named and left where it is."""
    run = write_recorded_run(tmp_path / "run", step_count=2)
    (tmp_path / "mine.html").write_text("<h1>my thesis</h1>")
    assert main([str(run), "--output", str(tmp_path / "mine.html")]) == 2
    assert main([str(run), "--output", str(tmp_path / "no" / "folder.html")]) == 2
    not_overwritten, no_folder = capsys.readouterr().err.splitlines()
    assert not_overwritten.startswith("error: --output: ")
    assert no_folder.startswith("error: --output: ")

    damaged = list_record_files(run / "rollouts")[0].path
    damaged.write_bytes(b"PAR1 not a table PAR1")
    assert main([str(run)]) == 2
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(damaged) in warning
    assert "move it out of the run, and the record lacks the steps 1 to 1" in warning
    damaged.rename(tmp_path / damaged.name)
    assert main([str(run)]) == 0
    assert (tmp_path / "mine.html").read_text() == "<h1>my thesis</h1>"


def test_a_run_under_way_may_merge_its_files_while_it_is_read(tmp_path, monkeypatch):
    """The report lists the files of 31 steps; before it reads them, they are merged into one."""
    run = write_recorded_run(tmp_path / "run", step_count=31)
    parts_before_merge = list_record_files(run / "rollouts")
    write_record_file(
        run / "rollouts", read_record_files(parts_before_merge), first_step=1, last_step=31
    )
    for part in parts_before_merge:
        part.path.unlink()
    # The first call still lists the files that were merged.
    outdated_lists = iter([parts_before_merge])
    monkeypatch.setattr(
        "adora_vl.report.run_view.list_record_files",
        lambda folder: next(outdated_lists, None) or list_record_files(folder),
    )
    assert len(load_run(run, max_rollouts=1000).groups) == 31 * 2  # of the steps


def test_a_long_run_is_thinned_evenly_and_says_so(tmp_path):
    """Whole steps are shown or left out, the first and the last among those that are shown."""
    run = write_recorded_run(tmp_path / "run", step_count=20)
    view = load_run(run, max_rollouts=40)  # of 20 steps x 2 groups x 4 rollouts
    assert [group["step"] for group in view.groups[::2]] == [1, 6, 11, 15, 20]
    assert view.notes == ["40 of 160 recorded rollouts are shown, those of 5 steps."]
    assert len(load_run(run, max_rollouts=1).groups) == 2


def test_an_answer_of_several_parts_is_shown_part_by_part(tmp_path):
    """An answer of several parts is shown part by part if today's grader gives the recorded reason.

    If it gives another one, or the reference is a single number, no parts are shown.
    """
    gold = "AB = 4, CD = 5"
    wrong_answer = r"so \boxed{CD = 5, AB = 4.1}"
    # a part of the answer, the part of the reference that it is compared with, the rule
    both = [("CD=5", "CD=5", "same_part"), ("AB=4.1", "-", "different_part")]
    # changed columns of a rollout, and the parts that are shown (None: none are)
    cases: list[tuple[dict[str, Any], list[tuple[str, str, str]] | None]] = [
        ({"completion": wrong_answer, "reason": "different_part"}, both),
        ({"completion": f"<answer>{wrong_answer}</answer>", "reason": "different_part"}, both),
        ({"completion": wrong_answer, "reason": "different_length"}, None),
        ({"completion": r"\boxed{CD = 5, AB = 4", "reason": "no_box"}, None),
        ({"completion": wrong_answer, "reason": "different_number", "answer": "5"}, None),
        (
            {
                "completion": "<answer>(3, 1.33)</answer>",
                "reason": "same_parts",
                "answer": r"(3, \frac{4}{3})",
            }
            | {"verdict": "correct"},
            [("3", "3", "same_number"), ("1.33", r"\frac{4}{3}", "rounded")],
        ),
    ]
    for number, (texts, expected) in enumerate(cases):
        texts = {"answer": gold, "verdict": "wrong", "choices": None} | texts
        run = write_recorded_run(
            tmp_path / str(number),
            step_count=1,
            groups=1,
            rollouts=1,
            **texts,
        )
        view = load_run(run, 100)
        (rollout,) = view.groups[0]["rollouts"]
        assert rollout[ROLLOUT_FIELDS.index("compared")] == expected, texts
        build_page([view], {})
    style = write_report_page(tmp_path / "page.html", tmp_path / "0").read_text()
    assert "part by part" in style


def test_a_record_without_choices_has_a_page(tmp_path):
    """An open problem has no choices, nor has a run from before they were recorded."""
    run = write_recorded_run(tmp_path / "run", step_count=1, choices=None)
    (part,) = list_record_files(run / "rollouts")
    write_record_file(
        run / "rollouts",
        read_record_files([part]).drop_columns(["choices"]),
        first_step=2,
        last_step=2,
    )
    assert [problem["choices"] for problem in load_run(run, 100).problems.values()] == [[], []]


def test_a_text_that_is_cut_says_how_much_is_left_out(tmp_path):
    """A text on the page has 12,000 characters at most."""
    run = write_recorded_run(tmp_path / "run", step_count=1, problem="x" * 12_000 + "y" * 1_500)
    (problem, *_) = load_run(run, 100).problems.values()
    assert problem["problem"] == "x" * 12_000 + "… (1,500 more characters)"


def test_runs_whose_folders_have_equal_names_are_told_by_their_paths(tmp_path):
    runs = [
        write_recorded_run(tmp_path / seed / "run", step_count=1) for seed in ("first", "second")
    ]
    page = write_report_page(tmp_path / "page.html", *runs)
    assert [run["name"] for run in unpack_data(page)["runs"]] == [str(run) for run in runs]


def test_diagrams_are_bounded_and_never_read_from_elsewhere(tmp_path, capsys):
    """Diagrams over `--max-image-mb` are left out, and so is a file outside of the run's folder.

    A record that names such a file was written by somebody else.
    """
    run = write_recorded_run(tmp_path / "run", step_count=1)
    write_report_page(tmp_path / "page.html", run, argv=("--max-image-mb", "0"))
    assert "1 diagrams are left out" in capsys.readouterr().out
    (tmp_path / "secret.png").write_bytes(b"secret")
    stranger_run = write_recorded_run(
        tmp_path / "stranger", step_count=1, images=["../../../secret.png"]
    )
    assert base64.b64encode(b"secret").decode() not in json.dumps(
        unpack_data(write_report_page(tmp_path / "s.html", stranger_run))
    )


def test_the_page_of_a_strangers_run_has_no_file_from_outside_of_its_folder(tmp_path, capsys):
    """Nothing outside of a run's folder comes into its page by a link, since pages are passed on.

    Diagrams outside are left out; metrics, a manifest or a record outside are refused. A link
    within the folder is followed, and so is one to the run.
    """
    secret = base64.b64encode(b"secret").decode()
    (tmp_path / "secret.png").write_bytes(b"secret")
    run = write_recorded_run(tmp_path / "run", step_count=1)
    [picture] = (run / "rollouts" / "_images").glob("*.png")
    picture_bytes = picture.read_bytes()
    picture.unlink()
    picture.symlink_to(tmp_path / "secret.png")
    page = write_report_page(tmp_path / "page.html", run)
    assert secret not in json.dumps(unpack_data(page))
    assert "1 diagram left out: a link leads out of the run's folder." in capsys.readouterr().out

    picture.unlink()
    (run / "kept.png").write_bytes(picture_bytes)
    picture.symlink_to(run / "kept.png")
    page = write_report_page(tmp_path / "within.html", run)
    assert base64.b64encode(picture_bytes).decode() in json.dumps(unpack_data(page)), (
        "a link within it"
    )
    (tmp_path / "alias").symlink_to(run)
    page = write_report_page(tmp_path / "alias.html", tmp_path / "alias")
    assert base64.b64encode(picture_bytes).decode() in json.dumps(unpack_data(page)), (
        "a link to the run"
    )

    picture.unlink()
    picture.write_bytes(picture_bytes)
    images = run / "rollouts" / "_images"
    images.rename(tmp_path / "moved")
    images.symlink_to(tmp_path / "moved")
    assert base64.b64encode(picture_bytes).decode() not in json.dumps(
        unpack_data(write_report_page(tmp_path / "folder.html", run))
    )

    for name in ("metrics.jsonl", "manifest.json", "rollouts"):
        stranger_run = write_recorded_run(tmp_path / name.partition(".")[0], step_count=1)
        outside = tmp_path / f"outside-{name}"
        if (stranger_run / name).exists():
            (stranger_run / name).rename(outside)
        else:
            outside.write_text('{"step": 1, "kind": "train", "secret": 1}')
        (stranger_run / name).symlink_to(outside)
        assert main([str(stranger_run), "--output", str(tmp_path / "none.html")]) == 2
        assert "is a link out of " in capsys.readouterr().err
        assert not (tmp_path / "none.html").exists()


def unpack_data(page: Path) -> dict[str, Any]:
    """Return what a page shows: its two compressed blocks of JSON, `data` and `texts`, as one."""
    blocks = re.findall(r'id="(?:data|texts)">([^<]*)<', page.read_text())
    data, texts = (json.loads(gzip.decompress(base64.b64decode(block))) for block in blocks)
    return {**data, **texts}


EXAMPLE_PAGE = Path(__file__).parents[3] / "docs" / "examples" / "report.html"


def test_the_finished_report_of_the_pages_has_the_form_that_its_command_makes_today(tmp_path):
    """`docs/examples/report.html` has the form that its command writes today.

    People who have installed nothing open it, so it is small and names no path of a machine.
    """
    page = (EXAMPLE_PAGE.parents[1] / "report.md").read_text()
    (options,) = re.findall(r"report adora grpo --output docs/examples/report.html (.+?)`", page)
    runs = [write_recorded_run(tmp_path / name, step_count=3) for name in ("adora", "grpo")]
    made_today = write_report_page(tmp_path / "page.html", *runs, argv=tuple(options.split()))
    assert EXAMPLE_PAGE.stat().st_size < 1_500_000
    example = unpack_data(EXAMPLE_PAGE)
    today = unpack_data(made_today)
    assert example.keys() == today.keys()
    assert example["rollout"] == today["rollout"]
    # the keys of the first run, then of the first group in it
    for part in ("runs", "groups"):
        for data in (example, today):
            data |= data.pop(part)[0] if part in data else {}
        assert example.keys() == today.keys(), part
    assert len(example["story"]) == 3
    assert "held-out accuracy" in example["result"]
    text = EXAMPLE_PAGE.read_text() + json.dumps(example)
    assert not re.search(r"/(home|root|tmp|work)/", text), "no path of a machine"


def test_the_page_is_self_contained(tmp_path):
    """It loads nothing from elsewhere, and the text of a model is never a part of its HTML.

    `ATTACKING_HTML` is markup with a script, which every text of that run has.
    """
    attacked = write_attacked_page(tmp_path)
    text = attacked.read_text()
    for _, attributes in TagsOfPage(text).tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert ATTACKING_HTML not in text
    assert "<script>document" not in text
    assert "<img" not in text
    # names, which nothing fetches
    namespaces = {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }
    assert set(re.findall(r"https?://[^\s\"']*", text)) <= namespaces
    assert unpack_data(attacked)["runs"][0]["groups"][0]["id"] == ATTACKING_HTML
    for name in _SCRIPT_FILES:
        script = (_VIEWER_FOLDER / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser",
            script,
        )


def test_every_phase_of_the_clock_has_a_place_and_a_colour_in_the_chart():
    """The chart of seconds has each of `PHASES`, with a colour for light and dark screens.

    A phase that it lacked would be missing from the seconds of a step.
    """
    phases_in_script = re.search(
        r"const PHASES = (\[.*\]);", (_VIEWER_FOLDER / "curves.js").read_text()
    )
    styles = (_VIEWER_FOLDER / "viewer.css").read_text()
    assert phases_in_script is not None
    assert sorted(json.loads(phases_in_script[1])) == sorted(PHASES)
    for phase in PHASES:
        assert f".area.phase-{phase} {{" in styles
        assert f".swatch.phase-{phase} {{" in styles
        assert styles.count(f"--{phase}: #") == 2, "for light and dark screens"


FORMULAS_BY_TEXT: dict[str, list[str]] = {
    "Find $x$. Is it $x < 5$?": ["$x$", "$x < 5$"],
    r"so \(a\), \[b\] and $$c$$": [r"\(a\)", r"\[b\]", "$$c$$"],
    r"Answer: \boxed{\frac{\sqrt{3}}{2}}.": [r"\boxed{\frac{\sqrt{3}}{2}}"],
    r"\angle A B C is \overline { C H }": [
        r"\angle A B C",
        r"\overline { C H }",
    ],  # as Geometry3K writes it
    "It costs $5 and $6. $x$ and $ y $ do not.": ["$x$", "$ y $"],
    r"C:\Users\new, \n, \alph": [],
    # not understood, so not changed
    r"$\foo{x}$ $\begin{aligned}a&=b\end{aligned}$ $\cancel{x}$": [],
    r"$\frac{1$ $ $ $$ \boxed{5": [r"$\frac{1$"],
    "$" + "x" * 401 + "$": [],
}


def test_a_formula_is_found_where_it_is_one():
    """`FORMULAS_BY_TEXT` has the formulas of each text; what is no formula stays a text."""
    assert {text: list(convert_formulas([text])) for text in FORMULAS_BY_TEXT} == FORMULAS_BY_TEXT
    # An answer is a formula altogether where it is LaTeX.
    assert list(convert_formulas([None], [r"2 \sqrt { 221 }", "x^2", "7", "Rome", None])) == [
        r"2 \sqrt { 221 }",
        "x^2",
    ]


def test_the_tree_says_what_the_formula_does():
    """A tree is a list of MathML's tag, its attributes and its children."""
    root = ["msqrt", {}, ["mrow", {}, ["mn", {}, "3"]]]
    fraction = ["mfrac", {}, ["mrow", {}, root], ["mrow", {}, ["mn", {}, "2"]]]
    boxed = ["menclose", {"notation": "box"}, ["mrow", {}, fraction]]
    assert latex_to_mathml(r"$\boxed{\frac{\sqrt{3}}{2}}$") == ["math", {}, ["mrow", {}, boxed]]
    assert latex_to_mathml("$$x$$") == ["math", {"display": "block"}, ["mrow", {}, ["mi", {}, "x"]]]


REFUSED_MARKUP = [
    r"\href{javascript:document.title='owned'}{x}",
    r"\style{color:red}{x}",
    r"\class{result}{x}",
    r"\color{red}{x}",
    rf"\text{{{ATTACKING_HTML}}}",
    rf"\mbox{{{ATTACKING_HTML}}}",
    rf"\href{{{ATTACKING_HTML}}}{{{ATTACKING_HTML}}}",
    r"\operatorname{<script>}",
    r"\text{&lt;script&gt;}",
    r"\unicode{60}",
    r"\tag{<b>}",
    r"\hspace{1e9em}",
]


def test_no_link_style_or_markup_gets_into_a_tree():
    """LaTeX with links, styles or markup has no tree (None), or one of plain tags alone."""
    trees = {latex: latex_to_mathml(f"${latex}$") for latex in REFUSED_MARKUP}
    assert {
        latex: tree
        for latex, tree in trees.items()
        if tree is not None and not allowed_tags(tree[2:])
    } == {}
    assert any(trees.values())


def allowed_tags(children) -> bool:
    """Return whether trees have only texts, and elements and attributes that layout needs."""
    attribute_names = {
        "display",
        "accent",
        "stretchy",
        "fence",
        "form",
        "mathvariant",
        "notation",
        "width",
        "displaystyle",
    }
    attribute_names |= {
        "scriptlevel",
        "linethickness",
        "columnalign",
        "separator",
        "movablelimits",
        "accentunder",
    }
    for child in children:
        if isinstance(child, str):
            continue
        tag, attributes, *rest = child
        if (
            not tag.startswith("m")
            or tag in {"maction", "mglyph", "merror"}
            or not attributes.keys() <= attribute_names
        ):
            return False
        if not allowed_tags(rest):
            return False
    return True


@given(st.text(alphabet="\\{}^_$&%<>=-'\"` abxfrac123", max_size=60))
@settings(max_examples=300)
def test_whatever_is_written_the_tree_is_small_and_plain(text):
    for tree in convert_formulas([f"${text}$", text], [text]).values():
        assert tree[0] == "math"
        assert allowed_tags(tree[2:])
        assert len(json.dumps(tree)) < 60_000


GROWING_FORMULAS = [
    r"$\def\a{\a\a}\a$",
    r"$\newcommand{\b}{\c\c}\newcommand{\c}{xx}\b$",
    r"$\renewcommand{\a}{\a\a}\a$",
    r"$\newenvironment{a}{\begin{a}}{\end{a}}\begin{a}\end{a}$",
    "$" + "{" * 199 + "x" + "}" * 199 + "$",
    "$" + "^" * 399 + "$",
    *(
        "$" * 12_000,
        r"\boxed{" * 1700,
        r"\boxed{{{" * 1300,
        r"\[" * 6000,
        r"\abc {{a}" * 1300,
        "$a" * 6000,
    ),
    *((r"\boxed{" + "{a}" * 390) * 10, r"\boxed{" + ("{" + "{a}" * 190) * 20),
]


def test_no_short_text_grows_in_the_page():
    """LaTeX can define commands that double a text each time; such a tree has a limit."""
    sizes = {text[:12]: len(json.dumps(convert_formulas([text]))) for text in GROWING_FORMULAS}
    assert {text: size for text, size in sizes.items() if size >= 60_000} == {}


def test_no_text_makes_the_page_slow():
    """The time to convert formulas grows in proportion to the text, whatever it repeats.

    Four times the text may take up to 9 times as long; by a pattern without bounds it would be 16.
    """

    def seconds(text: str) -> float:
        start_time = time.process_time()
        convert_formulas([text])
        return time.process_time() - start_time

    slow = {}
    for part in (
        "$",
        r"\boxed{",
        r"\boxed{{{",
        r"\[",
        r"\abc {{a}",
        "$a",
        r"\boxed{" + "{a}" * 390,
    ):
        text = part * (12_000 // len(part))
        short = min(seconds(text) for _ in range(3))
        long = min(seconds(text * 4) for _ in range(3))
        if long >= 9 * short:
            slow[part] = (short, long)
    assert slow == {}


def test_a_page_has_a_limit_of_formulas(monkeypatch):
    monkeypatch.setattr(module, "MAX_FORMULAS", 3)
    assert len(convert_formulas([f"$x_{number}$" for number in range(9)])) == 3
