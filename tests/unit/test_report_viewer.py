"""The page of a run: right figures, filters that a person can use, and no text of a model that does anything."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.record.metrics_file import read_metrics
from adora_vl.record.parts import parts, read_parts, write_part
from adora_vl.record.rollouts import Record
from adora_vl.report.__main__ import main
from adora_vl.report.page import _SCRIPTS, _VIEWER
from adora_vl.report.run import load_run
from adora_vl.report.why import why
from tests.browser import CHROMIUM, Browser
from tests.tiny_run import STEPS

ATTACK = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</script></p></article><iframe src='javascript:parent.document.title=`owned`'></iframe>'\">{{SCRIPT}}"
    "<svg onload='document.title=`owned`'>"
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to click in")
SETTINGS = {"adora_mode": "attenuation", "adora_criteria": ["length"]}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


def write_run(folder: Path, steps: int, *, groups: int = 2, rollouts: int = 4, **texts: str) -> Path:
    """A run whose step s, group g has g right rollouts of length 10 s; group 1 is attenuated."""
    record = Record(folder, 1, SETTINGS)
    record.start(0)
    picture = Image.new("RGB", (60, 40), "white")
    for step in range(1, steps + 1):
        rows: dict[str, list[Any]] = {}
        for number in range(groups * rollouts):
            group, rollout = divmod(number, rollouts)
            right = rollout < group
            row = {
                "step": step, "id": f"problem/{group}", "problem": f"Find x in {group}.", "answer": "7",
                "images": record.diagrams.keep(f"problem/{group}", [picture]),
                "verdict": "correct" if right else "wrong", "extracted": "7" if right else "8",
                "completion": f"step {step}: \\boxed{{{7 if right else 8}}}",
                "reason": "same_number", "reward": 1.0 if right else 0.1, "advantage_raw": 1.5 if right else -0.5,
                "advantage": 0.15 if right else -0.05, "weight": 0.1 if group == 1 else 1.0, "tds": group == 1,
                "pass_rate": group / rollouts, "longest_right": 10.0 * step if group else None, "mean_wrong": 20.0,
                "length": 10 * step, "truncated": False, "drift": 1e-6, **texts,
            }  # fmt: skip
            for name, value in row.items():
                rows.setdefault(name, []).append(value)
        record.add(rows, rollouts)
        record.flush(step)
    lines = [
        {"step": s, "kind": "train", "reward": s / 10, "adora/pass_rate": 0.5, "kl": s / 100}
        for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def make_page(output: Path, *runs: Path, words: tuple[str, ...] = ()) -> Path:
    assert main([*map(str, runs), "--output", str(output), *words]) == 0
    return output


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return make_page(folder / "page.html", write_run(folder / "adora", 12), write_run(folder / "grpo", 60, groups=1))


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
        ({"weight": 2.0, "tds": False}, {"adora_mode": "amplification", "adora_criteria": ["difficulty"]},
         "Amplified to 2: TAS, the pass rate 50% is at most tau 50%."),
        ({"weight": 1.0}, {"adora_mode": "off", "adora_criteria": ["difficulty"], "adora_tau": 0.25},
         "Plain GRPO, weight 1; ADORA's criteria say TDS, the pass rate 50% is above tau 25%."),
        ({"weight": 0.5}, {"adora_mode": "something new"}, "Attenuated to 0.5."),
        ({"weight": None}, {}, "No weight is recorded."),
    ],
)  # fmt: skip
def test_why_a_group_has_its_weight(group, settings, sentence):
    assert why({**GROUP, **group}, {**SETTINGS, **settings}) == sentence


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


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a run that attacks in every text that it has."""
    folder = tmp_path_factory.mktemp("attacked")
    texts = dict.fromkeys(("id", "problem", "answer", "completion", "verdict", "extracted", "reason"), ATTACK)
    run = write_run(folder / ATTACK.replace("/", "_")[:100], 2, **texts)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 3, "kind": "train", "reward": 1.0, ATTACK: 2.0, "note": ATTACK}) + "\n")
    return make_page(folder / "page.html", run)


def test_the_page_is_self_contained(attacked):
    text = attacked.read_text()
    for _, attributes in Tags(text).tags:
        assert not [name for name in attributes if name.startswith("on")] and "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert ATTACK not in text and "<script>document" not in text and "<img" not in text
    assert set(re.findall(r"https?://[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}
    assert unpacked(attacked)["runs"][0]["groups"][0]["id"] == ATTACK
    for name in _SCRIPTS:
        script = (_VIEWER / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser", script
        )


@needs_chromium
def test_texts_of_a_model_do_nothing(browser, attacked, tmp_path):
    """A page that would run them says so in its title, and a plain page with the same text does."""
    unsafe = tmp_path / "unsafe.html"
    unsafe.write_text(f"<!doctype html><title>fine</title><p>{ATTACK}</p>")
    browser.open(unsafe)
    browser.wait("document.title === 'owned'")
    browser.open(attacked)
    assert browser.text(".rollout .text") == ATTACK == browser.text(".problem .text") == browser.text("h3 code")
    assert ATTACK in browser.texts("#other-figure option")
    browser.put("#other-figure", ATTACK)
    browser.click("#follow")
    assert browser.text("#charts figcaption") == ATTACK
    assert "training report" in browser.js("document.title") and browser.errors == []
    assert (
        browser.js("document.querySelectorAll('iframe, script:not(#data), #charts img').length") == 1
    )  # its own script
    assert [url for url in browser.requests if not url.startswith(("data:", "file:", "about:"))] == []


@needs_chromium
def test_the_policy_alone_stops_what_would_not_be_escaped(browser, attacked, tmp_path):
    forgotten = tmp_path / "forgotten.html"
    forgotten.write_text(attacked.read_text().replace("</h1>", f"</h1>{ATTACK.replace('{{SCRIPT}}', '')}", 1))
    browser.open(forgotten)
    browser.js("new Promise(done => setTimeout(done, 300))")
    assert "training report" in browser.js("document.title")
    assert any("Content Security Policy" in error for error in browser.errors)
    refused = "(() => { try { document.body.innerHTML = '<p>'; return 'taken' } catch (e) { return e.name } })()"
    assert browser.js(refused) == "TypeError"


@needs_chromium
def test_a_person_finds_a_group(browser, page):
    """By every filter, with the mouse; the counts are those of `write_run`: 12 steps x 2 groups and 60 x 1."""
    browser.look()
    browser.open(page)
    count = lambda: browser.text("#count").split(" groups")[0]  # noqa: E731
    assert count() == "84 of 84" and len(browser.texts("#list button")) == 50
    assert browser.text("#page-number") == "1 of 2"
    browser.click("#page-on")
    assert len(browser.texts("#list button")) == 34 and browser.text("#page-number") == "2 of 2"
    for field, value, expected in (
        ("run", "1", 60), ("weight", "tds", 12), ("weight", "changed", 12), ("weight", "one", 72),
        ("weight", "signal", 12), ("weight", "held", 12),
        ("verdict", "mixed", 12), ("verdict", "none", 72), ("verdict", "all", 0), ("verdict", "timeout", 0),
        ("id", "PROBLEM/1", 12), ("from", "50", 11), ("to", "2", 6), ("text", "step 60:", 1),
        ("text", "find X in 1", 12),
    ):  # fmt: skip
        browser.put(f"#filter-{field}", value)
        assert count() == f"{expected} of 84", (field, value)
        browser.click("#filters button[type=reset]")
        browser.wait("document.getElementById('count').textContent.startsWith('84 of')")
    browser.put("#filter-weight", "tds")
    browser.put("#filter-from", "7")
    assert count() == "6 of 84" and browser.text("#detail h3") == "Step 7, adora problem/1"
    browser.click("#list li:nth-child(3) button")
    assert browser.text("#detail h3") == "Step 9, adora problem/1"
    assert browser.text("#why") == (
        "Attenuated to 0.1: TDS, the longest right rollout (90 tokens) is longer than the mean of the finished wrong "
        "ones (20.0 tokens)."
    )  # the record's word is shown, and so is what it rests on
    assert browser.texts(".rollout .verdict") == ["✓ right", "✗ wrong", "✗ wrong", "✗ wrong"]
    assert (
        "1.5 → 0.15" in browser.text(".rollout .facts")
        and browser.js("document.querySelector('#detail img').naturalWidth") == 60
    )
    browser.click("#follow")
    assert count() == "12 of 84" and browser.text("#detail h3") == "Step 9, adora problem/1"
    browser.click("#followed tbody tr:nth-child(2) button")
    assert browser.text("#detail h3") == "Step 2, adora problem/1" and browser.errors == []


@needs_chromium
def test_the_keyboard_is_enough(browser, page):
    browser.open(page)
    browser.put("#filter-run", "0")
    browser.press("j")
    browser.press("j")
    assert browser.text("#detail h3") == "Step 2, adora problem/0"
    browser.press("k")
    assert browser.text("#detail h3") == "Step 1, adora problem/1"
    assert browser.js("document.activeElement.getAttribute('aria-current')") == "true"
    browser.press("f")
    assert browser.text("#count").startswith("12 of 84")
    browser.js("document.querySelector('.plot').focus()")
    browser.press("ArrowLeft")
    assert browser.text(".reading") == "step 60: grpo 6"
    for _ in range(53):
        browser.press("ArrowLeft")
    assert browser.text(".reading") == "step 7: adora 0.7, grpo 0.7"
    browser.press("Enter")
    assert browser.js("document.getElementById('filter-from').value") == "7"
    browser.js("document.getElementById('filter-text').focus()")
    browser.press("j")  # letters in a field are text
    assert browser.js("document.getElementById('filter-text').value") == "j"
    browser.click("#filters button[type=reset]")
    browser.wait("document.getElementById('count').textContent.startsWith('84 of')")
    browser.js("document.getElementById('filter-from').focus()")
    shown = browser.text("#detail h3")
    browser.press("j")
    assert browser.text("#detail h3") == shown


@needs_chromium
def test_an_address_leads_back_to_its_group(browser, page):
    browser.open(page, "#run=0&step=11&id=problem%2F1")
    assert browser.text("#detail h3") == "Step 11, adora problem/1"
    browser.press("j")
    assert browser.js("location.hash") == "#run=1&step=11&id=problem%2F0"


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_legible_on_a_phone_and_in_the_dark(browser, page, dark):
    """No sideways scrolling at 360 pixels, every field has a label, and contrasts of 4.5 and more (WCAG AA)."""
    browser.look(width=360, height=740, dark=dark)
    browser.open(page, "#run=0&step=11&id=problem%2F1")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js("[...document.querySelectorAll('input, select')].every(n => n.labels.length === 1)")
    assert browser.js("[...document.querySelectorAll('img')].every(n => n.alt)")
    colours = browser.js(
        "['h1', '.hint', '.reading', '.legend li', '.facts dt', '.verdict.wrong', '.verdict.correct', '.badge', 'code',"
        " '.rollout .text', '#list button', '.line2'].map(s => { const n = document.querySelector(s);"
        " let b = n; while (getComputedStyle(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentElement;"
        " return [s, getComputedStyle(n).color, getComputedStyle(b).backgroundColor]; })"
    )
    for selector, ink, paper in colours:
        assert contrast(ink, paper) >= 4.5, (selector, ink, paper)
    assert (luminance(colours[0][2]) < 0.1) is dark


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of `rgb(r, g, b)`."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@needs_chromium
def test_two_real_runs_over_each_other(browser, adora_run, grpo_run, tmp_path):
    """What the page shows is what the runs' own files say."""
    path = make_page(tmp_path / "page.html", adora_run, grpo_run)
    browser.look()
    browser.open(path)
    assert browser.text("#count") == f"{2 * 4 * STEPS} of {2 * 4 * STEPS} groups."
    browser.js("document.querySelector('.plot').focus()")
    browser.press("ArrowLeft")
    last = [read_metrics(run / "metrics.jsonl")[STEPS - 1] for run in (adora_run, grpo_run)]
    shown = [float(text) for text in re.findall(r"(?:adora|grpo) ([\d.]+)", browser.text(".reading"))]
    assert shown == pytest.approx([line["reward"] for line in last], abs=1e-3)
    titles = browser.texts("figcaption")
    assert {"Pass rate", "Entropy, nats a token", "Seconds a step, adora", "Seconds a step, grpo"} <= set(titles)
    assert "Not logged by these runs: KL to the reference; Drift of engine" in browser.text("#charts > .hint")
    browser.put("#filter-run", "1")
    assert browser.text("#why").startswith("Plain GRPO, weight 1; ADORA's criteria say ")
    assert browser.js("document.querySelector('#detail img').naturalWidth") > 0 and browser.errors == []
