r"""LaTeX of problems and rollouts becomes MathML; what is hostile, endless or not understood stays as it is written."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adora_vl.report import formulas as module
from adora_vl.report.formulas import formulas, mathml
from tests.report_support import ATTACK


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Find $x$. Is it $x < 5$?", ["$x$", "$x < 5$"]),
        (r"so \(a\), \[b\] and $$c$$", [r"\(a\)", r"\[b\]", "$$c$$"]),
        (r"Answer: \boxed{\frac{\sqrt{3}}{2}}.", [r"\boxed{\frac{\sqrt{3}}{2}}"]),
        (r"\angle A B C is \overline { C H }", [r"\angle A B C", r"\overline { C H }"]),  # as Geometry3K writes it
        ("It costs $5 and $6. $x$ and $ y $ do not.", ["$x$", "$ y $"]),
        (r"C:\Users\new, \n, \alph", []),
        (r"$\foo{x}$ $\begin{aligned}a&=b\end{aligned}$ $\cancel{x}$", []),  # not understood, so not changed
        (r"$\frac{1$ $ $ $$ \boxed{5", [r"$\frac{1$"]),
        ("$" + "x" * 401 + "$", []),
    ],
)
def test_a_formula_is_found_where_it_is_one(text, found):
    assert list(formulas([text])) == found


def test_an_answer_is_a_formula_altogether_where_it_is_latex():
    assert list(formulas([None], [r"2 \sqrt { 221 }", "x^2", "7", "Rome", None])) == [r"2 \sqrt { 221 }", "x^2"]


def test_the_tree_says_what_the_formula_does():
    root = ["msqrt", {}, ["mrow", {}, ["mn", {}, "3"]]]
    fraction = ["mfrac", {}, ["mrow", {}, root], ["mrow", {}, ["mn", {}, "2"]]]
    boxed = ["menclose", {"notation": "box"}, ["mrow", {}, fraction]]
    assert mathml(r"$\boxed{\frac{\sqrt{3}}{2}}$") == ["math", {}, ["mrow", {}, boxed]]
    assert mathml("$$x$$") == ["math", {"display": "block"}, ["mrow", {}, ["mi", {}, "x"]]]


@pytest.mark.parametrize(
    "latex",
    [
        r"\href{javascript:document.title='owned'}{x}", r"\style{color:red}{x}", r"\class{result}{x}",
        r"\color{red}{x}", rf"\text{{{ATTACK}}}", rf"\mbox{{{ATTACK}}}", rf"\href{{{ATTACK}}}{{{ATTACK}}}",
        r"\operatorname{<script>}", r"\text{&lt;script&gt;}", r"\unicode{60}", r"\tag{<b>}", r"\hspace{1e9em}",
    ],
)  # fmt: skip
def test_no_link_style_or_markup_gets_into_a_tree(latex):
    tree = mathml(f"${latex}$")
    assert tree is None or allowed(tree[2:]), tree


def allowed(children) -> bool:
    """Nothing but texts, and the elements and attributes that layout needs."""
    names = {"display", "accent", "stretchy", "fence", "form", "mathvariant", "notation", "width", "displaystyle"}
    names |= {"scriptlevel", "linethickness", "columnalign", "separator", "movablelimits", "accentunder"}
    for child in children:
        if isinstance(child, str):
            continue
        tag, attributes, *rest = child
        if not tag.startswith("m") or tag in {"maction", "mglyph", "merror"} or not attributes.keys() <= names:
            return False
        if not allowed(rest):
            return False
    return True


@given(st.text(alphabet="\\{}^_$&%<>=-'\"` abxfrac123", max_size=60))
@settings(max_examples=300, deadline=None)
def test_whatever_is_written_the_tree_is_small_and_plain(text):
    for tree in formulas([f"${text}$", text], [text]).values():
        assert tree[0] == "math" and allowed(tree[2:]) and len(json.dumps(tree)) < 60_000


@pytest.mark.parametrize(
    "text",
    [
        r"$\def\a{\a\a}\a$",
        r"$\newcommand{\b}{\c\c}\newcommand{\c}{xx}\b$",
        r"$\renewcommand{\a}{\a\a}\a$",
        r"$\newenvironment{a}{\begin{a}}{\end{a}}\begin{a}\end{a}$",
        "$" + "{" * 199 + "x" + "}" * 199 + "$",
        "$" + "^" * 399 + "$",
        *("$" * 12_000, r"\boxed{" * 1700, r"\boxed{{{" * 1300, r"\[" * 6000, r"\abc {{a}" * 1300, "$a" * 6000),
        *((r"\boxed{" + "{a}" * 390) * 10, r"\boxed{" + ("{" + "{a}" * 190) * 20),
    ],
    ids=lambda text: text[:12],
)
def test_no_short_text_grows_in_the_page(text):
    assert len(json.dumps(formulas([text]))) < 60_000


@pytest.mark.parametrize("part", ["$", r"\boxed{", r"\boxed{{{", r"\[", r"\abc {{a}", "$a", r"\boxed{" + "{a}" * 390])
def test_no_text_makes_the_page_slow(part):
    """A text four times as long takes four times as long, where a pattern without its bounds takes 16 times."""

    def seconds(text: str) -> float:
        began = time.process_time()
        formulas([text])
        return time.process_time() - began

    text = part * (12_000 // len(part))
    short, long = (min(seconds(text * times) for _ in range(3)) for times in (1, 4))
    assert long < 9 * short


def test_an_environment_without_the_converter_still_gets_a_page(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert formulas(["$x$"], ["x^2"]) == {}


def test_a_page_has_a_limit(monkeypatch):
    monkeypatch.setattr(module, "MAX_FORMULAS", 3)
    assert len(formulas([f"$x_{number}$" for number in range(9)])) == 3
