"""The pages are short to read: the length of their sentences, and how many figures stand in them.

Tables and code are not prose. A lab book, whose figures are its purpose, is bounded in its
sentences alone.
"""

import re
from dataclasses import dataclass

import pytest

from tests.support.paths import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# The appendix of the experiments is what a reader of a table goes to for how it came about.
PAGES_WITHOUT_LIMIT = ("experiments_appendix",)
MOST_WORDS_A_SENTENCE = 16  # of a sentence, on average
MOST_FIGURES_A_SENTENCE = 2  # for every hundred words

_BEGINNINGS_OF_NO_PROSE = ("|", "#", "!", "<", "    ")
_LIST_ENTRY_PATTERN = re.compile(r"^(?:[-*]|\d+\.) ")
_LINK_PATTERN = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE_PATTERN = re.compile(r"`[^`]*`")
_SENTENCE_END_PATTERN = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"(]|vLLM)")
# A version, a year and the number of a paper or thread are names, and so are 7B and H200.
_NAME_WITH_NUMBER_PATTERN = re.compile(
    r"\b(?:TRL|vLLM|Python|Transformers|torch|DeepSpeed|R) ?\d[\d.]*(?:(?: to| and|,) 3\.\d+)?"
    r"|\b(?:19|20)\d\d\b(?![,.]\d)|arXiv \d[\d.]*|#\d+"
)
_FIGURE_PATTERN = re.compile(r"(?<![\w.,/-])[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w]*[A-Za-z])")


@dataclass(frozen=True)
class Count:
    """What a page has: words, sentences, and figures."""

    words: int
    sentences: int
    figures: int

    @property
    def words_in_a_sentence(self) -> float:
        """The mean length of a sentence, in words."""
        return self.words / max(self.sentences, 1)

    @property
    def figures_in_a_hundred_words(self) -> float:
        """How many figures stand in a hundred words."""
        return 100 * self.figures / max(self.words, 1)


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a page, without its tables, code, headings and pictures."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    paragraphs: list[str] = [""]
    for line in text.splitlines():
        entry = _LIST_ENTRY_PATTERN.match(line.lstrip())
        is_prose = bool(line.strip()) and not line.startswith(_BEGINNINGS_OF_NO_PROSE)
        if not is_prose or entry is not None:
            paragraphs.append("")
        if is_prose:
            paragraphs[-1] += " " + _LIST_ENTRY_PATTERN.sub("", line.strip())
    whole = [_CODE_PATTERN.sub("Code", _LINK_PATTERN.sub(r"\1", text)) for text in paragraphs]
    split = [_SENTENCE_END_PATTERN.split(text.replace("*", "").strip()) for text in whole]
    return [sentence for group in split for sentence in group if sentence]


def count_words_and_figures(text: str) -> Count:
    """Count the words, sentences and figures in the sentences of a page."""
    sentences = sentences_of(text)
    figures = [
        _FIGURE_PATTERN.findall(_NAME_WITH_NUMBER_PATTERN.sub("", sentence))
        for sentence in sentences
    ]
    return Count(
        words=sum(len(sentence.split()) for sentence in sentences),
        sentences=len(sentences),
        figures=sum(map(len, figures)),
    )


def test_a_page_is_counted_without_its_tables_and_code():
    """Names with numbers are no figures; four numbers in the sentences are."""
    text = (
        "# 12 heads\n\nTRL 1.16 has 7B models of 2026, and `x = 3` is code. It took 0.5 to 12 s.\n\n"
        "| 1 | 2 |\n\n```\n3 4\n```\n\n- one entry of [a list 5](page.md#6)\n- another (7,000)\n"
    )
    assert sentences_of(text)[1:] == [
        "It took 0.5 to 12 s.",
        "one entry of a list 5",
        "another (7,000)",
    ]
    assert count_words_and_figures(text) == Count(words=25, sentences=4, figures=4)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_to_read(page):
    """A longer sentence is divided, and a figure goes into a table or into benchmarks/README.md."""
    count = count_words_and_figures(page.read_text())
    assert count.words_in_a_sentence <= MOST_WORDS_A_SENTENCE
    if page.stem not in PAGES_WITHOUT_LIMIT:
        assert count.figures_in_a_hundred_words <= MOST_FIGURES_A_SENTENCE
