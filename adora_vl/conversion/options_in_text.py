"""Takes the options out of the text of a problem: `Choices: A:40 B:50`."""

import re
from itertools import pairwise
from typing import NamedTuple

from adora_vl.conversion.placeholders import image_marks_as_words

# A letter before an option: `A:40`, `A. 40`, `(A) 40`, `(a) 40`, `A、40`.
_OPTION_LETTER_PATTERN = re.compile(
    r"(?<![A-Za-z0-9\\∠△])(?:[(（\[]\s*([A-Ha-h])\s*[)）\]]|([A-H])\s*[).:：、．])\s*(?=\S)"
)
_OPTIONS_HEADING_PATTERN = re.compile(
    r"\s*(?:(?:answer\s+)?(?:choices|options)|选项)\s*[:：]?\s*\Z", re.IGNORECASE
)
_HOW_TO_ANSWER_PATTERN = re.compile(r"answer|choose|select|option|letter|boxed|选", re.IGNORECASE)
_LONGEST_OPTION = 200  # characters of an option


class ProblemAndOptions(NamedTuple):
    """A problem without the options that stood in its text, and these options."""

    problem: str
    options: list[str]


def options_in_text(problem: str) -> ProblemAndOptions | None:
    """Return the options in the text of a problem, and the problem without them.

    `What is x? A. 3 B. 4` has `3` and `4`. There have to be at least two options, each on one line,
    with the letters A, B, C, ... in order. Only an instruction on how to answer may follow them.
    Otherwise None is returned. For example, the text

        What is AB?
        Choices:
        A. 3
        B. 4
        Answer with the letter.

    has the options `3` and `4`. The first and the last line are the problem without them.
    """
    letter_matches = _last_run_of_letters(problem)  # of the letters before the options
    if not letter_matches:
        return None
    texts = []  # of the options, each between its letter and the next one
    for letter_match, next_match in pairwise(letter_matches):
        texts.append(problem[letter_match.end() : next_match.start()])
    # The last option ends with its line.
    last_text, line_end, after_options = problem[letter_matches[-1].end() :].partition("\n")
    texts.append(last_text)
    if after_options.strip() and not _HOW_TO_ANSWER_PATTERN.search(after_options):
        return None
    options = [text.strip().rstrip(",;，；").strip() for text in texts]
    for option in options:
        if not option or "\n" in option or len(option) > _LONGEST_OPTION:
            return None
    question = _OPTIONS_HEADING_PATTERN.sub("", problem[: letter_matches[0].start()]).rstrip()
    # An option with the mark of an image, `<image2>`, needs the picture in its place.
    has_image_option = any(image_marks_as_words(option) != option for option in options)
    if not question or has_image_option:
        return None
    instruction = f"{line_end}{after_options}".rstrip() if after_options.strip() else ""
    return ProblemAndOptions(problem=question + instruction, options=options)


def _last_run_of_letters(problem: str) -> list[re.Match[str]]:
    """Return the matches of the last letters `A.`, `B.`, `C.`, ... that come in this order.

    Such a run begins with A. Returns [] where no run has at least two letters.
    """
    run: list[re.Match[str]] = []
    runs: list[list[re.Match[str]]] = []
    for letter_match in _OPTION_LETTER_PATTERN.finditer(problem):
        letter = (letter_match[1] or letter_match[2]).upper()
        if letter == "A":
            run = [letter_match]
            runs.append(run)
        elif run and letter == chr(ord("A") + len(run)):
            run.append(letter_match)
    long_runs = [run for run in runs if len(run) > 1]
    return long_runs[-1] if long_runs else []
