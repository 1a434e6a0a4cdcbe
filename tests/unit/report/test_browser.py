"""The page of a run in a real browser: what a person finds there, and that no text of a model does
anything.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from adora_vl.record.metrics import read_metrics
from tests.support.browser import assert_attack_runs_unescaped
from tests.support.recorded_runs import (
    ADORA_SETTINGS,
    ATTACKING_HTML,
    VIEW_LIMITS,
    turns_with_one_zoom,
    write_attacked_page,
    write_recorded_run,
    write_report_page,
)
from tests.support.tiny_run import TINY_RUN_STEPS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page_of_two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page of 12 steps x 2 groups of `adora`, and 60 steps x 1 group of `grpo`."""
    folder = tmp_path_factory.mktemp("runs")
    return write_report_page(
        folder / "page.html",
        write_recorded_run(folder / "adora", step_count=12),
        write_recorded_run(folder / "grpo", step_count=60, groups=1),
    )


@pytest.fixture(scope="module")
def attacked_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page of a run in which every text is `ATTACKING_HTML`."""
    return write_attacked_page(tmp_path_factory.mktemp("attacked"))


def test_texts_of_a_model_do_nothing(browser, attacked_page, tmp_path):
    """HTML in a model's answer is shown as text, and never run.

    If it were run, the title of the page would change, as that of a plain page with it does.
    """
    assert_attack_runs_unescaped(ATTACKING_HTML, browser, tmp_path)
    browser.open(attacked_page)
    assert browser.text(".rollout .text") == ATTACKING_HTML
    assert browser.text(".problem .text") == ATTACKING_HTML
    assert browser.text("h3 code") == ATTACKING_HTML
    assert ATTACKING_HTML in browser.all_texts("#other-figure option")
    browser.fill("#other-figure", ATTACKING_HTML)
    browser.click("#follow")
    assert browser.text("#charts figcaption") == ATTACKING_HTML
    assert "training report" in browser.evaluate("document.title")
    assert browser.errors == []
    # one element, the script of the page itself
    active_elements = "document.querySelectorAll('iframe, script:not(#data), #charts img')"
    assert browser.evaluate(f"{active_elements}.length") == 1
    assert requests_to_elsewhere(browser) == []


def requests_to_elsewhere(browser: Any) -> list[str]:
    """The addresses that the page has asked for, apart from its own file and what is in it."""
    return [url for url in browser.requests if not url.startswith(("data:", "file:", "about:"))]


def test_the_policy_alone_stops_what_would_not_be_escaped(browser, attacked_page, tmp_path):
    """The page's Content Security Policy refuses markup even where it stands unescaped."""
    forgotten = tmp_path / "forgotten.html"
    forgotten.write_text(
        attacked_page.read_text().replace(
            "</h1>", f"</h1>{ATTACKING_HTML.replace('{{SCRIPT}}', '')}", 1
        )
    )
    browser.open(forgotten)
    browser.wait_for_error("Content Security Policy")
    assert "training report" in browser.evaluate("document.title")
    refused = (
        "(() => { try { document.body.innerHTML = '<p>'; return 'taken' } catch (e) { return "
        "e.name } })()"
    )
    assert browser.evaluate(refused) == "TypeError"


def test_a_person_finds_a_group(browser, page_of_two_runs):
    """Every filter works with the mouse, and a group is found, read and followed through the steps.

    The counts are of the 12 steps x 2 groups and 60 x 1 of `page_of_two_runs`.
    """
    browser.set_viewport()
    browser.open(page_of_two_runs)

    def count() -> str:
        """Return how many groups of all the filter shows, such as `12 of 84`."""
        return browser.text("#count").split(" groups")[0]

    assert count() == "84 of 84"
    assert len(browser.all_texts("#list button")) == 50
    assert browser.text("#page-number") == "1 of 2"
    browser.click("#page-on")
    assert len(browser.all_texts("#list button")) == 34
    assert browser.text("#page-number") == "2 of 2"
    # a field of the filter, what is put into it, how many of the 84 groups it shows
    for field, value, expected in (
        ("run", "1", 60),
        ("weight", "tds", 12),
        ("weight", "changed", 12),
        ("weight", "one", 72),
        ("weight", "signal", 12),
        ("weight", "held", 12),
        ("verdict", "mixed", 12),
        ("verdict", "none", 72),
        ("verdict", "all", 0),
        ("verdict", "unparseable", 0),
        ("id", "PROBLEM/1", 12),
        ("from", "50", 11),
        ("to", "2", 6),
        ("text", "step 60:", 1),
        ("text", "find X in 1", 12),
    ):
        browser.fill(f"#filter-{field}", value)
        assert count() == f"{expected} of 84", (field, value)
        browser.click("#filters button[type=reset]")
        browser.wait("document.getElementById('count').textContent.startsWith('84 of')")

    browser.fill("#filter-weight", "tds")
    browser.fill("#filter-from", "7")
    assert count() == "6 of 84"
    assert browser.text("#detail h3") == "Step 7, adora problem/1"
    browser.click("#list li:nth-child(3) button")
    assert browser.text("#detail h3") == "Step 9, adora problem/1"
    assert browser.text(".why") == (
        "Attenuated to 0.1: TDS, the longest right rollout is longer than the mean of the "
        "finished wrong ones."
    )  # the record's word is shown, and so is what it rests on
    assert browser.all_texts(".rollout .verdict") == ["✓ right", "✗ wrong", "✗ wrong", "✗ wrong"]
    assert browser.all_texts(".problem .choices li") == ["(A) 5", "(B) 7"], (
        "as the prompt has them, and formulas printed"
    )
    assert "1.5 → 0.15" in browser.text(".rollout .facts")
    assert browser.evaluate("document.querySelector('#detail img').naturalWidth") == 60

    browser.click("#follow")  # the problem of the group through all steps
    assert count() == "12 of 84"
    assert browser.text("#detail h3") == "Step 9, adora problem/1"
    browser.click("#followed tbody tr:nth-child(2) button")
    assert browser.text("#detail h3") == "Step 2, adora problem/1"
    assert browser.errors == []


def test_the_keyboard_is_enough(browser, page_of_two_runs):
    """`j` and `k` go to the next and last group, `f` follows a problem, arrows read a chart."""
    browser.open(page_of_two_runs)
    browser.fill("#filter-run", "0")
    browser.press("j")
    browser.press("j")
    assert browser.text("#detail h3") == "Step 2, adora problem/0"
    browser.press("k")
    assert browser.text("#detail h3") == "Step 1, adora problem/1"
    assert browser.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    browser.press("f")
    assert browser.text("#count").startswith("12 of 84")
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("ArrowLeft")
    assert browser.text(".reading") == "step 60: grpo 6"
    for _ in range(60 - 7):
        browser.press("ArrowLeft")
    assert browser.text(".reading") == "step 7: adora 0.7, grpo 0.7"
    browser.press("Enter")
    assert browser.evaluate("document.getElementById('filter-from').value") == "7"
    browser.evaluate("document.getElementById('filter-text').focus()")
    browser.press("j")  # letters in a field are text
    assert browser.evaluate("document.getElementById('filter-text').value") == "j"
    browser.click("#filters button[type=reset]")
    browser.wait("document.getElementById('count').textContent.startsWith('84 of')")
    browser.evaluate("document.getElementById('filter-from').focus()")
    heading = browser.text("#detail h3")
    browser.press("j")
    assert browser.text("#detail h3") == heading


def test_the_result_comes_first_and_the_usual_curves_need_no_menu(browser, tmp_path):
    """A faint curve is the one before smoothing, which a chart of evaluations does not have."""
    run = write_recorded_run(tmp_path / "adora", step_count=20)
    lines = [
        {**line, "loss": 0.1, "kl": 0.2, "grad_norm": 1.5}
        for line in read_metrics(run / "metrics.jsonl")
    ]
    evaluations = [
        {"step": step, "kind": "eval", "eval_geometry3k_accuracy": 0.02 * step} for step in (5, 20)
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*lines, *evaluations])))
    browser.open(write_report_page(tmp_path / "page.html", run))
    assert (
        browser.text(".result")
        == "Held-out accuracy, geometry3k 10 % → 40 % (first and last evaluation)"
    )
    titles = browser.all_texts("#charts figcaption")
    assert {"Loss", "KL to the reference", "Gradient norm", "Held-out accuracy, geometry3k"} <= set(
        titles
    )
    assert browser.evaluate("document.getElementById('smoothing').value") == "5"
    faint_count = (
        "document.querySelectorAll('#charts figure')[{}].querySelectorAll('path.faint').length"
    )
    assert browser.evaluate(faint_count.format(0)) == 1
    evaluation_chart = titles.index("Held-out accuracy, geometry3k")
    assert browser.evaluate(faint_count.format(evaluation_chart)) == 0, "means over evaluations lag"
    browser.fill("#smoothing", "1")
    assert browser.evaluate("document.querySelectorAll('#charts path.faint').length") == 0


def test_the_four_views_of_a_benchmark_stand_in_one_chart(browser, tmp_path):
    """A run was evaluated on the problems with image, text, both and none, as MathVerse is."""
    views = {f"eval_geometry3k_{view}_accuracy": share for view, share in ACCURACY_BY_VIEW.items()}
    run = write_recorded_run(tmp_path / "adora", step_count=3)
    other_run = write_recorded_run(tmp_path / "other", step_count=3)
    for folder in (run, other_run):
        evaluations = [{"step": step, "kind": "eval", **views} for step in (1, 3)]
        file = folder / "metrics.jsonl"
        file.write_text("\n".join(map(json.dumps, [*read_metrics(file), *evaluations])))
    browser.open(write_report_page(tmp_path / "page.html", run))
    assert "Held-out accuracy, geometry3k_image 60 %" in browser.text(".result")
    titles = browser.all_texts("#charts figcaption")
    assert [title for title in titles if title.startswith("Held-out")] == [
        "Held-out accuracy, geometry3k"
    ]
    chart = f"#charts figure:nth-child({titles.index('Held-out accuracy, geometry3k') + 1})"
    browser.evaluate(f"document.querySelector('{chart} .plot').focus()")
    browser.press("ArrowLeft")
    reading = browser.text(f"{chart} .reading")
    assert all(
        f"{view} {100 * share:.0f} %" in reading for view, share in ACCURACY_BY_VIEW.items()
    ), reading
    colours = (
        f"new Set([...document.querySelectorAll('{chart} svg path')].map(n => "
        "n.getAttribute('class'))).size"
    )
    assert browser.evaluate(colours) == 4
    browser.open(write_report_page(tmp_path / "two.html", run, other_run))
    titles = browser.all_texts("#charts figcaption")
    held_out_titles = [title for title in titles if title.startswith("Held-out")]
    assert len(held_out_titles) == 4, "one of each view"


ACCURACY_BY_VIEW = {"image": 0.6, "text": 0.7, "both": 0.8, "blank": 0.1}


def test_a_run_one_step_ahead_shows_how_old_its_rollouts_are_and_who_waited(browser, tmp_path):
    """The page of any other run has neither chart, and does not list them as missing."""
    ahead = write_recorded_run(tmp_path / "ahead", step_count=3)
    other_run = write_recorded_run(tmp_path / "other", step_count=3)
    waited = {"adora/trainer_waited_s": 1.5, "adora/servers_waited_s": 0.5}
    lines = [
        {**line, "adora/staleness": 1, **waited} for line in read_metrics(ahead / "metrics.jsonl")
    ]
    (ahead / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    expected = {"Age of the rollouts in generations", "Seconds waited"}
    browser.open(write_report_page(tmp_path / "ahead.html", ahead))
    titles = browser.all_texts("#charts figcaption")
    assert expected <= set(titles)
    waits = f"#charts figure:nth-child({titles.index('Seconds waited') + 1})"
    browser.evaluate(f"document.querySelector('{waits} .plot').focus()")
    browser.press("ArrowLeft")
    assert browser.text(f"{waits} .reading") == "step 3: by the trainer 1.5 s, by the servers 0.5 s"
    browser.open(write_report_page(tmp_path / "other.html", other_run))
    assert not expected & set(browser.all_texts("#charts figcaption"))
    assert not any(title in browser.text("#charts > .missing") for title in expected)


def test_shares_go_from_0_to_100_percent_also_where_all_are_0(browser, tmp_path):
    """The axis of a share is whole; that of another metric fits its values."""
    run = write_recorded_run(tmp_path / "adora", step_count=3)
    keys = ("adora/tds_share", "adora/pass_rate", "eval_geometry3k_accuracy", "kl")
    axis = {}  # the labels of the vertical axis, by the title of the chart
    for key in keys:  # equal charts are drawn once
        lines = [{"step": step, "kind": "train", key: 0.0} for step in (1, 2, 3)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        browser.open(write_report_page(tmp_path / "page.html", run))
        ticks = "[...document.querySelectorAll('#charts .tick[text-anchor=end]')]"
        title = browser.text("#charts figcaption")
        axis[title] = browser.evaluate(f"{ticks}.map(node => node.textContent)")
    shares = ("Share of TDS prompts", "Pass rate", "Held-out accuracy, geometry3k")
    full_axis = ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert {title: axis[title] for title in shares} == dict.fromkeys(shares, full_axis)
    assert axis["KL to the reference"][0] == "0"


def test_formulas_are_printed_and_their_source_is_a_click_away(browser, tmp_path):
    """The title of a printed formula is its LaTeX; a button shows all sources."""
    problem = r"If $\frac{x}{2} < 5$ and \overline { C H }, what is $\foo$ for $5 and $6?"
    long = "so " * 400 + r"\(y_1\)"
    texts: dict[str, Any] = {
        "problem": problem,
        "choices": None,
        "answer": r"2 \sqrt { 3 }",
        "extracted": r"\sqrt{12}",
        "completion": long,
    }
    browser.set_viewport()
    browser.open(
        write_report_page(
            tmp_path / "page.html", write_recorded_run(tmp_path / "adora", step_count=1, **texts)
        )
    )
    sources = "[...document.querySelectorAll('{} .formula')].map(node => node.title)"
    assert browser.evaluate(sources.format(".problem .text")) == [
        r"$\frac{x}{2} < 5$",
        r"\overline { C H }",
    ]
    assert browser.evaluate(sources.format(".gold")) == [r"2 \sqrt { 3 }"]
    assert set(browser.evaluate(sources.format(".rollout"))) == {r"\sqrt{12}"}
    above, below = browser.evaluate(
        "[...document.querySelector('mfrac').children].map(n => n.getBoundingClientRect()).map(r "
        "=> [r.top, r.bottom])"
    )
    assert above[0] < above[1] <= below[0] < below[1], "the browser lays it out as a fraction"
    assert browser.text(".problem .text").endswith(r", what is $\foo$ for $5 and $6?"), (
        "what is not understood stays"
    )
    browser.click(".rollout button")  # the rest of a long text
    assert browser.evaluate("document.querySelectorAll('.rollout msub').length") == 1
    browser.click("#source")
    assert browser.text(".problem .text") == problem
    assert browser.text(".gold") == texts["answer"]
    assert browser.evaluate("document.querySelectorAll('math').length") == 0
    assert (
        browser.evaluate(
            "document.activeElement.id + document.activeElement.getAttribute('aria-pressed')"
        )
        == "sourcetrue"
    )
    browser.press("Enter")
    assert browser.evaluate("document.querySelectorAll('.problem math').length") == 3
    assert browser.errors == []


def test_formulas_of_a_model_do_nothing(browser, tmp_path):
    """LaTeX with links, styles, HTML or endless macros has no effect on the page.

    It is shown as a formula or as text.
    """
    script = "document.title='owned'"
    attacks = [
        rf"$\href{{javascript:{script}}}{{CLICK}}$",
        rf"$\text{{{ATTACKING_HTML}}}$",
        rf"\boxed{{{ATTACKING_HTML}}}",
        r"$\style{background:url(http://127.0.0.1:9/x)}{x}$",
        rf"\(\class{{skip}}{{x}}\) \[\mbox{{{ATTACKING_HTML}}}\]",
        r"$\def\a{\a\a}\a$",
        r"$\operatorname{<script>}$",
    ]
    text = " ".join(attacks)
    answers = {"answer": attacks[0][1:-1], "extracted": attacks[1]}
    fields: dict[str, Any] = dict.fromkeys(("problem", "completion"), text) | answers
    browser.set_viewport()
    browser.open(
        write_report_page(
            tmp_path / "page.html", write_recorded_run(tmp_path / "adora", step_count=1, **fields)
        )
    )
    assert browser.evaluate("document.querySelectorAll('.formula').length") > 4, (
        "some of it is a formula, and harmless"
    )
    browser.click(".problem math mi")
    forbidden = ".formula :is(a, script, img, svg, iframe), math :is([href], [style], [class])"
    assert browser.evaluate(f"document.querySelectorAll('{forbidden}').length") == 0
    assert "training report" in browser.evaluate("document.title")
    assert browser.errors == []
    assert requests_to_elsewhere(browser) == []
    browser.click("#source")
    assert browser.text(".problem .text") == text == browser.text(".rollout .text")


def test_a_click_enlarges_a_diagram_and_escape_closes_it(browser, page_of_two_runs):
    """The address opens a group of step 11, which has a diagram."""
    browser.open(page_of_two_runs, "#run=0&step=11&id=problem%2F1")
    size = "document.querySelector('{} img').getBoundingClientRect().width"
    small = browser.evaluate(size.format(".diagram"))
    browser.click(".diagram")
    assert browser.evaluate(size.format("#enlarged")) > 2 * small
    browser.press("Escape")
    assert not browser.evaluate("document.getElementById('enlarged').open")
    browser.click(".diagram")
    browser.click("#enlarged button")
    assert not browser.evaluate("document.getElementById('enlarged').open")
    assert browser.errors == []


def test_the_first_screen_says_what_a_run_did_and_why(browser, page_of_two_runs, tmp_path):
    """The page begins with what the run did and a rollout; the curves come after.

    With a single run its name is the title, and is not repeated in the list of runs.
    """
    run = write_recorded_run(tmp_path / "lonely", step_count=20)
    browser.set_viewport(width=1400, height=900)
    browser.open(write_report_page(tmp_path / "one.html", run))
    assert browser.text("h1") == "lonely"
    assert "lonely" not in browser.text("#runs")
    assert browser.all_texts(".story li") == [
        "Signal: 20 of 40 recorded groups (50 %) have rewards that differ, and only these are "
        "learned from.",
        "Weights: 20 of these groups (100 %) were attenuated. They held 100 % of all |advantage| "
        "before the weights and 100 % after.",
        "Length: from the first to the last fifth of the steps, right answers became longer "
        "(25 → 185 tokens) and wrong ones became longer (25 → 185 tokens).",
    ]

    top_of = "document.querySelector('{}').getBoundingClientRect().top"
    assert browser.evaluate(top_of.format(".rollout")) < 900, "a rollout is on the first screen"
    assert browser.evaluate(f"{top_of.format('#groups')} < {top_of.format('#curves')}")
    assert "temporarily disadvantageous" in browser.text("#groups .hint")
    assert not browser.evaluate("document.querySelector('#filter-run').getClientRects().length")
    browser.open(page_of_two_runs)
    assert browser.text("h1") == "2 runs"
    assert browser.all_texts("#runs h2") == ["adora", "grpo"]


def test_a_chart_says_how_to_read_it_and_none_is_equal_to_another(browser, tmp_path):
    """Where the accuracy is the pass rate at every step, it has no chart of its own."""
    run = write_recorded_run(tmp_path / "adora", step_count=6)
    file = run / "metrics.jsonl"
    figures = {"grading/correct": 0.5, "adora/length_correct": 20.0, "adora/length_wrong": 30.0}
    lines = [{**line, **figures} for line in read_metrics(file)]
    file.write_text("\n".join(map(json.dumps, lines)))
    browser.open(write_report_page(tmp_path / "page.html", run))
    titles = browser.all_texts("#charts figcaption")
    assert "Pass rate" in titles
    assert "Accuracy in training" not in titles
    assert browser.text("#charts .equal") == "Accuracy in training is equal to pass rate."
    assert "accuracy" not in browser.all_texts("#figures th")
    assert len(browser.all_texts("#charts .how")) == len(titles)
    legends = browser.all_texts("#charts .legend")
    assert legends == ["rightwrong"], "a single line needs no legend"
    lines[-1]["grading/correct"] = 0.6
    file.write_text("\n".join(map(json.dumps, lines)))
    browser.open(write_report_page(tmp_path / "page.html", run))
    assert "Accuracy in training" in browser.all_texts("#charts figcaption")
    assert browser.all_texts("#charts .equal") == []


def test_the_list_shows_pictures_and_words_and_is_sorted_by_what_one_asks_for(browser, tmp_path):
    """Three steps of two groups each: `2 1` is group 1 of step 2."""
    problem = "<image>Find the length of the side AB of it."
    run = write_recorded_run(tmp_path / "adora", step_count=3, problem=problem)
    browser.open(write_report_page(tmp_path / "page.html", run))
    assert browser.text("#list .line2") == "Find the length of the side…"
    assert browser.evaluate("document.querySelector('#list img').naturalWidth") == 60
    assert browser.text(".problem .text") == problem.removeprefix("<image>")
    orders = {
        "step": ["1 0", "1 1", "2 0", "2 1", "3 0", "3 1"],
        "weight": ["1 1", "2 1", "3 1", "1 0", "2 0", "3 0"],
        "advantage": ["1 1", "2 1", "3 1", "1 0", "2 0", "3 0"],
        "disagreement": ["1 1", "2 1", "3 1", "1 0", "2 0", "3 0"],
        "length": ["3 0", "3 1", "2 0", "2 1", "1 0", "1 1"],
    }
    # All advantages of group 0 are -0.05; those of group 1 have 0.15 among them.
    steps_and_problems = (
        "[...document.querySelectorAll('#list button')].map(node => "
        "node.getAttribute('aria-label').match(/Step (\\d), adora, problem.(\\d)/).slice(1)"
        ".join(' '))"
    )
    for order, expected in orders.items():
        browser.fill("#filter-sort", order)
        assert browser.evaluate(steps_and_problems) == expected, order
    browser.click("#filters button[type=reset]")
    browser.wait("document.getElementById('filter-sort').value === 'step'")


def test_a_call_is_drawn_on_the_picture_and_spelled_as_a_person_would(browser, tmp_path):
    """Both pictures of the page have a box over them, in percent of their size."""
    run = write_recorded_run(
        tmp_path / "looked",
        step_count=2,
        settings={**ADORA_SETTINGS, "view": VIEW_LIMITS},
        turns=turns_with_one_zoom(),
    )
    write_recorded_run(tmp_path / "blind", step_count=2)
    browser.open(write_report_page(tmp_path / "page.html", run))
    assert browser.text(".call code") == "zoom(0, 20, 30, 40)"
    assert browser.text(".turns .tool .hint") == "tool, 0.44 ms"
    detail = browser.text("#detail")
    assert "tool_call" not in detail
    assert "<image>" not in detail
    assert "I look." in detail
    # zoom(0, 20, 30, 40) of a picture of 60 x 40, which this model sees at that size
    box = "['x', 'y', 'width', 'height'].map(name => document.querySelector('{} rect').getAttribute(name))"
    for boxes in (".problem .places", ".call .places"):
        assert browser.evaluate(box.format(boxes)) == ["0", "50", "50", "50"]
    width = "document.querySelector('.problem {}').getBoundingClientRect().width"
    assert browser.evaluate(width.format(".places")) == browser.evaluate(width.format("img"))
    for choice, expected in (
        ("called", 4),
        ("none", 0),
        ("failed", 0),
    ):
        browser.fill("#filter-calls", choice)
        assert browser.text("#count").startswith(f"{expected} of 4"), choice
    browser.open(write_report_page(tmp_path / "blind.html", tmp_path / "blind"))
    assert not browser.evaluate("document.querySelector('#filter-calls').getClientRects().length")


def test_an_address_leads_back_to_its_group(browser, page_of_two_runs):
    """The address of the page names the group that is shown."""
    browser.open(page_of_two_runs, "#run=0&step=11&id=problem%2F1")
    assert browser.text("#detail h3") == "Step 11, adora problem/1"
    browser.press("j")
    assert browser.evaluate("location.hash") == "#run=1&step=11&id=problem%2F0"


def test_a_print_has_the_groups_of_the_filter_and_the_figures_and_no_buttons(
    browser, page_of_two_runs, tmp_path
):
    """A print shows 20 groups at most, each with its rollouts."""
    browser.open(
        write_report_page(
            tmp_path / "short.html", write_recorded_run(tmp_path / "short", step_count=2)
        )
    )
    assert browser.evaluate("document.querySelector('#table').open"), "no curve has anything to see"
    browser.open(page_of_two_runs)
    browser.page.emulate_media(media="print")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    hidden = (
        "[...document.querySelectorAll('form, nav, .buttons, .keys')].every(n => "
        "n.getClientRects().length === 0)"
    )
    assert browser.evaluate(hidden)
    assert browser.evaluate("document.querySelector('#figures').getClientRects().length") == 1
    assert len(browser.all_texts("#printed article")) == 20
    assert browser.text("#printed .hint") == "The first 20 of 84 groups of the filter."
    assert browser.evaluate("document.querySelector('#detail').getClientRects().length") == 0
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    browser.page.emulate_media(media="screen")
    browser.fill("#filter-weight", "tds")
    browser.fill("#filter-from", "9")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    headings = browser.all_texts("#printed h3")
    assert headings == [f"Step {step}, adora problem/1" for step in (9, 10, 11, 12)]
    ids = browser.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    assert len(ids) == len(set(ids))
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    assert browser.all_texts("#printed article") == []


@pytest.mark.parametrize("dark", [False, True])
def test_it_is_legible_on_a_phone_and_in_the_dark(browser, page_of_two_runs, dark):
    """No sideways scrolling at 360 pixels, every field has a label, and contrasts of 4.5 and more
    (WCAG AA).
    """
    browser.set_viewport(width=360, height=740, dark=dark)
    browser.open(page_of_two_runs, "#run=0&step=11&id=problem%2F1")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(
        "[...document.querySelectorAll('input, select')].every(n => n.labels.length === 1)"
    )
    assert browser.evaluate(
        "[...document.querySelectorAll('img')].every(n => n.hasAttribute('alt'))"
    )
    colours = browser.evaluate(
        "['h1', '.hint', '.reading', '.legend li', '.facts dt', '.verdict.wrong', "
        "'.verdict.correct', '.badge', 'code', '.rollout .text', '#list button', '.line2'].map(s "
        "=> { const n = document.querySelector(s); let b = n; while "
        "(getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentElement; return "
        "[s, getComputedStyle(n).color, getComputedStyle(b).backgroundColor]; })"
    )
    for selector, ink, paper in colours:
        assert contrast(ink, paper) >= 4.5, (selector, ink, paper)
    assert (luminance(colours[0][2]) < 0.1) is dark


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text_color: str, background: str) -> float:
    """WCAG 2's ratio of contrast between two colours, from 1 to 21."""
    light, dark = sorted((luminance(text_color), luminance(background)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_two_real_runs_over_each_other(browser, adora_run, grpo_run, tmp_path):
    """The page shows what the runs' own files say."""
    path = write_report_page(tmp_path / "page.html", adora_run, grpo_run)
    browser.set_viewport()
    browser.open(path)
    assert browser.text("#count") == f"{2 * 4 * TINY_RUN_STEPS} of {2 * 4 * TINY_RUN_STEPS} groups."
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("ArrowLeft")
    last_lines = [
        read_metrics(run / "metrics.jsonl")[TINY_RUN_STEPS - 1] for run in (adora_run, grpo_run)
    ]
    rewards = [
        float(text) for text in re.findall(r"(?:adora|grpo) ([\d.]+)", browser.text(".reading"))
    ]
    assert rewards == pytest.approx([line["reward"] for line in last_lines], abs=1e-3)
    titles = browser.all_texts("figcaption")
    assert {
        "Pass rate",
        "Entropy, nats per token",
        "Seconds per step, adora",
        "Seconds per step, grpo",
    } <= set(titles)
    assert "Not logged by these runs: KL to the reference; Drift of engine" in browser.text(
        "#charts > .missing"
    )
    browser.fill("#filter-run", "1")
    assert browser.text(".why").startswith("GRPO, weight 1; ADORA's criteria say ")
    assert browser.evaluate("document.querySelector('#detail img').naturalWidth") > 0
    assert browser.errors == []


def test_claims_are_coloured_and_a_legend_says_what_the_colours_mean(browser, tmp_path):
    """A person on a telephone has no pointer to hold over a colour."""
    claims = [
        [0, 6, "false"],
        [8, 15, "new"],
        [17, 31, "answer"],
    ]
    texts: dict[str, Any] = {
        "completion": "AD = 6. BD = 12. the area is 60",
        "new": 1,
        "false": 1,
        "steps": json.dumps(claims),
    }
    run = write_recorded_run(tmp_path / "run", step_count=1, **texts)
    browser.open(write_report_page(tmp_path / "page.html", run))
    assert browser.all_texts(".rollout .claim")[:3] == ["AD = 6", "BD = 12", "the area is 60"]
    legend = ["false", "true and new", "the answer itself, true"]
    assert browser.all_texts(".legend .claim") == legend
    browser.open(
        write_report_page(
            tmp_path / "plain.html", write_recorded_run(tmp_path / "without", step_count=1)
        )
    )
    assert browser.all_texts(".legend .claim") == []
    assert browser.errors == []
