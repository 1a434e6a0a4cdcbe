"""`python -m eval.dynamath`: DynaMath, ten variants of each problem, with its official prompt,
score and worst case.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.inference.dataset import load_problems
    from adora_vl.evals.inference.predictions import TEXT, wrong_fields
    from adora_vl.evals.options import HubDataOptions, ScoreOptions
    from adora_vl.evals.records import (
        Benchmark,
        Graded,
        LoadedProblems,
        OwnFigures,
        Prediction,
        Problem,
        RowGrade,
    )
    from adora_vl.evals.scoring.score import (
        cell_from_counts,
        correct_by_problem,
        extraction_item,
        verdict_of,
    )

SPLITS = tuple(f"sample_variant{number}" for number in range(1, 11))
COLUMNS = dict.fromkeys(("question", "answer", "answer_type", "subject", "level"), TEXT)
check = partial(wrong_fields, kinds=COLUMNS)
_TOLERANCE = 0.001
_GUIDE = """
## Answer Instruction Please provide an answer to the question outlined above. Your response should adhere \
to the following JSON format, which includes two keys: 'solution' and 'short answer'. The 'solution' key can contain \
detailed steps needed to solve the question, and the 'short answer' key should provide a concise response. If the \
problem is a multiple choice problem, just provide the corresponing choice option, such as 'A', 'B', 'C', or 'D'. If \
the answer is a numerical value, format it as a three-digit floating-point number.

Example of expected JSON response format:

"""
_EXAMPLE = {"solution": "[Detailed step-by-step explanation]", "short answer": "[Concise Answer]"}


def prompt(row: dict[str, Any]) -> str:
    """Return the official prompt for a row.

    It is the question, and the form of the answer, an object of JSON.
    """
    number = "Please answer in a floating-point number." if row["answer_type"] == "float" else ""
    return f"## Question\n{row['question']}{number}{_GUIDE}{json.dumps(_EXAMPLE, indent=4)}"


def short_answer(response: str) -> tuple[str, str]:
    """Return the answer by the official extraction, and how it was found.

    It is the key `short answer` of the JSON in a response, whose backslashes are removed; else the
    last line without its last sign (evaluation/opensource_json_eval.py in DynaMath/DynaMath).
    """
    start = response.find("{")
    end = response.rfind("}")
    text = response
    if 0 <= start < end:
        text = response[start : end + 1].replace("\\", "")
    try:
        content = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text.split("\n")[-1][:-1], "last_line"
    if not isinstance(content, dict):
        return "", "no_object"
    return str(content.get("short answer")), "json"


def is_officially_right(answer: str, reference: str, kind: str) -> bool:
    """Return whether an answer is right by the official rule.

    A number is met to within a thousandth, in multiples of π too, a letter by one among the first
    three signs, and a text by an answer that contains it.
    """
    if kind == "float":
        word = answer if answer.isdigit() else answer.split(" ")[0]
        number, pi, _ = word.partition("π")
        try:
            return abs(float(number) * (math.pi if pi else 1) - float(reference)) <= _TOLERANCE
        except ValueError:
            return False
    if kind == "multiple choice":
        return answer == reference if len(answer) == 1 else reference in answer[:3]
    return reference in answer


def grade(row: Prediction, options: ScoreOptions) -> RowGrade:
    """Return the verdict on a row by the official rule, and the groups that it counts in."""
    answer, rule = short_answer(row["response"])
    groups = {name: [row[name]] for name in ("subject", "level", "answer_type")}
    return RowGrade(
        verdict=verdict_of(is_officially_right(answer, row["answer"], row["answer_type"])),
        extracted=answer,
        reason=rule,
        groups=groups,
    )


def _summary(
    rows: Sequence[Prediction], graded: Sequence[Graded], options: ScoreOptions
) -> OwnFigures:
    """Return the worst case, and the robustness.

    The worst case is the share of problems of which every variant is right. Divided by the accuracy
    it is the robustness.
    """
    variants: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for item in graded:
        problem = item.pid.rpartition("/")[2]
        variants[problem, item.sample].append(item.correct)
    all_right = sum(map(all, variants.values()))
    answers_each = max(map(len, correct_by_problem(graded).values()))
    worst = cell_from_counts(all_right, len(variants), answers_each)
    accuracy = sum(item.correct for item in graded) / len(graded)
    robustness = worst["accuracy"] / accuracy if worst and accuracy else None
    n_variants = max(map(len, variants.values()))
    warnings = []
    if n_variants < len(SPLITS):
        warnings.append(
            f"the worst case is over {n_variants} of the {len(SPLITS)} variants; --split all"
        )
    return OwnFigures(
        {"variants": {"worst_case": worst, "robustness": robustness}}, warnings=warnings
    )


def load(options: HubDataOptions) -> LoadedProblems:
    """Return the problems of a split, or with `all` of every variant, and a hash of the data."""
    problems = list[Problem]()
    hashes = list[str]()
    splits: Sequence[str] = (options.split,)
    if options.split == "all" and not Path(options.data).is_file():
        splits = SPLITS
    for split in splits:
        loaded = load_problems(
            options,
            needed=("id", *COLUMNS),
            image_columns=("decoded_image", "image"),
            prompt=prompt,
            check=check,
            id_column="id",
            split=split,
            renamed={"ground_truth": "answer", "knowledge_level": "level"},
        )
        problems += [
            replace(problem, fields={**problem.fields, "pid": f"{split}/{problem.pid}"})
            for problem in loaded.problems
        ]
        hashes.append(loaded.data_hash)
    return LoadedProblems(problems=problems, data_hash="+".join(hashes))


BENCHMARK = Benchmark(
    name="dynamath",
    split="all",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": "official"},
    data_options=HubDataOptions,
    check=check,
    fingerprint=("data_revision",),
    id_column="id",
    summary=_summary,
    item=extraction_item,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
