"""`python -m eval.wemath`: We-Math, with its official prompt, rule and four-way diagnosis, strict
and loose.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import TEXT, matching, wrong_fields
    from adora_vl.evals.options import HubDataOptions, ScoreOptions, option
    from adora_vl.evals.records import Benchmark, Graded, OwnFigures, Prediction, RowGrade
    from adora_vl.evals.scoring.choice import extract_choice, lettered_options
    from adora_vl.evals.scoring.score import (
        cell_from_counts,
        correct_by_problem,
        mean_with_interval,
        rule_set,
        verdict_of,
    )
    from adora_vl.evals.scoring.table import percent_with_interval
    from adora_vl.utils.cli import amount

RULE_SETS = ("official", "letter")
_PROMPT = """\
Now, we require you to solve a multiple-choice math question. Please briefly describe your thought process and provide \
the final answer(option).
Question: {question}
Option: {option}
Regarding the format, please answer following the template below, and be sure to include two <> symbols:
<Thought process>: <<your thought process>> <Answer>: <<your option>>"""
_OPTION = re.compile(r"(?:^|[;\s])\s*([A-H])[.．]")
COLUMNS = {
    "ID": TEXT,
    "key": matching(
        "2steps_(?:[12]|multi)|3steps_(?:[123]|multi)", "such as 2steps_1, 3steps_3 or 3steps_multi"
    ),
    "knowledge concept": TEXT,
    "question": TEXT,
    "option": TEXT,
    "answer": matching("[A-H]", "a letter from A to H"),
}
check = partial(wrong_fields, kinds=COLUMNS)
_TEMPLATE = re.compile(
    r"<\s*(Answer|Thought process)\s*>|<<\s*((?:(?!<<)(?s:.))*?)\s*>>|<\s*([A-H](?:[.:][^<>]*)?)>"
)
_STEPS = {"2": "two steps", "3": "three steps"}


def prompt(row: dict[str, Any]) -> str:
    """Return the official prompt for a row.

    It is the question, its options, and the form of the answer.
    """
    return _PROMPT.format(question=row["question"], option=row["option"])


def official_letter(response: str) -> str | None:
    """Return the letter by the official extraction, or None.

    It is the first character behind the last `Answer`, without `<`, `>`, `:` and `.`, where that is
    one from A to H. The rule is made for answers in the form of the official prompt; `boxed{B}` has
    no letter.
    """
    tail = re.sub(r"[<>:.]", "", response.split("Answer")[-1].strip()).strip()
    return tail[0] if tail and tail[0] in "ABCDEFGH" else None


@dataclass(frozen=True, kw_only=True)
class WeMathScoreOptions(ScoreOptions):
    """Which letter counts."""

    rules: Literal["official", "letter"] = option(
        "letter", help="official is made for answers in the official form", choices=RULE_SETS
    )


def grade(row: Prediction, options: WeMathScoreOptions) -> RowGrade:
    """Return the verdict on a row by `options.rules`, and the groups that it counts in.

    They are the number of steps, and for a single step its concept.
    """
    if options.rules == "official":
        letter = official_letter(row["response"])
        rule = "official"
    else:
        without_template = _TEMPLATE.sub(
            lambda match: match[1] or match[2] or match[3] or "", row["response"]
        )
        letter, rule = extract_choice(
            without_template, lettered_options(row["option"], _OPTION) or [""] * 5
        )
    steps, _, step = row["key"].partition("steps_")  # `3steps_2`; `3steps_multi` is the whole
    is_whole = step == "multi"
    groups = {"steps": [_STEPS[steps] if is_whole else "one step"]}
    if not is_whole:
        groups["concept"] = [row["knowledge concept"]]
    return RowGrade(
        verdict=verdict_of(letter == row["answer"]), extracted=letter, reason=rule, groups=groups
    )


def diagnosis(steps: Sequence[bool], whole_right: bool, *, strict: bool) -> str:
    """Return the diagnosis of the answers to the steps of a problem and to the whole.

    The kinds are those of Qiao et al. 2024, We-Math, section 3.3:

    - IK, insufficient knowledge: the whole is wrong, and a step is.
    - IG, inadequate generalisation: the whole is wrong, and no step is.
    - CM, complete mastery: the whole is right, and every step is; loose: any step is.
    - RM, rote memorisation: the whole is right, and a step is wrong; loose: all are.
    """
    if not whole_right:
        return "IG" if all(steps) else "IK"
    mastered = all(steps) if strict else any(steps)
    return "CM" if mastered else "RM"


_DEFINITION = (
    "of the problems whose steps were all asked: IK (insufficient knowledge), IG (inadequate "
    "generalisation) and CM (complete mastery) as shares of all of them, RM (rote memorisation) "
    "as a share of CM and RM; the score is the mean of 1 for CM, a half for IG, and 0 for IK and "
    "RM"
)


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: WeMathScoreOptions
) -> OwnFigures:
    """Return the strict and the loose score, and the shares of each kind of diagnosis.

    Only problems with an answer to every step and to the whole are diagnosed, each sample apart.
    """
    # Whether each answer of a problem's sample is right, by the key of its step.
    answers: dict[tuple[str, int], dict[str, bool]] = defaultdict(dict)
    for row, item in zip(rows, graded, strict=True):
        answers[row["ID"], item.sample][row["key"]] = item.correct
    complete = {}
    for problem, correct_by_key in answers.items():
        # The key of any step, such as `3steps_2`, says how many steps there are beside the whole.
        n_steps = int(next(iter(correct_by_key))[0])
        if len(correct_by_key) == n_steps + 1:
            complete[problem] = correct_by_key
    incomplete = {ID for ID, _ in answers} - {ID for ID, _ in complete}
    warnings = []
    if incomplete:
        warnings.append(
            f"{amount(len(incomplete), 'problem')} without an answer to every step and the whole, "
            "left out of the diagnosis"
        )
    if not complete:
        no_score: dict[str, Any] = {"strict": None, "loose": None, "definition": _DEFINITION}
        return OwnFigures(figures={"score": no_score}, warnings=warnings)
    answers_each = max(map(len, correct_by_problem(graded).values()))
    cells: dict[str, Any] = {}
    scores: dict[str, Any] = {"definition": _DEFINITION}
    lines = []
    for name in ("strict", "loose"):
        kinds = []
        for correct_by_key in complete.values():
            # The whole comes last: `multi` sorts behind the numbers.
            *steps, is_whole_right = [correct_by_key[key] for key in sorted(correct_by_key)]
            kinds.append(diagnosis(steps, is_whole_right, strict=name == "strict"))
        counts = Counter(kinds)
        if name == "strict":  # the loose counts of IK and IG are the same
            cells = {
                kind: cell_from_counts(counts[kind], len(kinds), answers_each)
                for kind in ("IK", "IG")
            }
        cells[f"CM_{name}"] = cell_from_counts(counts["CM"], len(kinds), answers_each)
        cells[f"RM_{name}"] = cell_from_counts(
            counts["RM"], counts["CM"] + counts["RM"], answers_each
        )
        credits = [{"CM": 1.0, "IG": 0.5}.get(kind, 0.0) for kind in kinds]
        figure = mean_with_interval(credits)
        scores[name] = figure["value"]
        accuracy = percent_with_interval(figure["value"], figure["interval_95"])
        lines.append(f"We-Math's score, {name}: {accuracy}")
    return OwnFigures({"score": scores, "diagnosis": cells}, lines=lines, warnings=warnings)


# The rows are every step of a composite problem, and the whole.
load = partial(
    load_problems,
    needed=("question number", *COLUMNS),
    image_columns=("image_path",),
    prompt=prompt,
    check=check,
    id_column="question number",
)


BENCHMARK = Benchmark(
    name="wemath",
    split="testmini",
    load=load,
    grade=grade,
    rules=rule_set,
    score_options=WeMathScoreOptions,
    data_options=HubDataOptions,
    check=check,
    fingerprint=("data_revision",),
    id_column="question number",
    summary=_summary,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
