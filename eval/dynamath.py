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

from adora_vl.evals.inference.dataset import DataLayout, load_problems
from adora_vl.evals.inference.predictions import TEXT_VALUE, describe_field_fault
from adora_vl.evals.options import HubDataOptions, ScoreOptions
from adora_vl.evals.records import (
    CORRECT,
    WRONG,
    Benchmark,
    BenchmarkSummary,
    GradedAnswer,
    LoadedProblems,
    Prediction,
    Problem,
    RowGrade,
)
from adora_vl.evals.scoring.score import (
    accuracy_of_share,
    build_extraction_item,
)

# Each split has one variant of every problem.
SPLIT_NAMES = tuple(f"sample_variant{number}" for number in range(1, 11))
# The columns that each row has, and what their values have to be.
REQUIRED_COLUMNS = dict.fromkeys(
    ("question", "answer", "answer_type", "subject", "level"), TEXT_VALUE
)
check_row = partial(describe_field_fault, types=REQUIRED_COLUMNS)
_FLOAT_TOLERANCE = 0.001  # by which the official score lets a number differ
# The line breaks are those of the official prompt, also where they end no sentence.
_ANSWER_INSTRUCTION = (
    "\n"
    "## Answer Instruction Please provide an answer to the question outlined above. Your response "
    "should adhere \n"
    "to the following JSON format, which includes two keys: 'solution' and 'short answer'. The "
    "'solution' key can contain \n"
    "detailed steps needed to solve the question, and the 'short answer' key should provide a "
    "concise response. If the problem is a multiple choice problem, just provide the corresponing "
    "choice option, \n"
    "such as 'A', 'B', 'C', or 'D'. If the answer is a numerical value, format it as a three-digit "
    "floating-point number.\n"
    "\n"
    "Example of expected JSON response format:\n"
    "\n"
)
_EXAMPLE_RESPONSE = {
    "solution": "[Detailed step-by-step explanation]",
    "short answer": "[Concise Answer]",
}


def prompt(row: dict[str, Any]) -> str:
    """Build the official prompt of a row: the question, and a request to answer in JSON."""
    request = "Please answer in a floating-point number." if row["answer_type"] == "float" else ""
    return f"## Question\n{row['question']}{request}{_ANSWER_INSTRUCTION}{json.dumps(_EXAMPLE_RESPONSE, indent=4)}"


def extract_short_answer(response: str) -> tuple[str, str]:
    """Extract the answer of a response as the official score does.

    The prompt asks for JSON with the key `short answer`. For a response without JSON the official
    code takes the last line, but drops its last character. Source:
    evaluation/opensource_json_eval.py in DynaMath/DynaMath.

    Returns the answer, and how it was found:

    - `{"solution": "2 + 3", "short answer": "5"}` gives `5` by `json`
    - `It is 5.` gives `It is 5` by `last_line`
    - `[1, 2]`, which is JSON but no object, gives an empty answer by `no_object`
    """
    start = response.find("{")
    end = response.rfind("}")
    text = response
    if 0 <= start < end:
        # The official code removes backslashes, since LaTeX has some that JSON does not allow.
        text = response[start : end + 1].replace("\\", "")
    try:
        content = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        last_line = text.split("\n")[-1]
        return last_line[:-1], "last_line"
    if not isinstance(content, dict):
        return "", "no_object"
    return str(content.get("short answer")), "json"


def is_officially_right(answer: str, reference: str, answer_type: str) -> bool:
    """Return whether an extracted answer is right by the official rule.

    Args:
        answer: The extracted answer.
        reference: The reference answer.
        answer_type: What decides how both are compared: `float`, `multiple choice` or another word.
    """
    # A number may differ by a thousandth, and may be a multiple of π: `2π` is 6.2832. Words after
    # it are ignored, so `12 cm` is 12.
    if answer_type == "float":
        first_word = answer if answer.isdigit() else answer.split(" ")[0]
        number, pi_sign, _ = first_word.partition("π")
        factor = math.pi if pi_sign else 1
        try:
            return abs(float(number) * factor - float(reference)) <= _FLOAT_TOLERANCE
        except ValueError:
            return False
    # The letter has to be among the first three characters: `(B) a park` is B.
    if answer_type == "multiple choice":
        return answer == reference if len(answer) == 1 else reference in answer[:3]
    # Any other answer has to contain the reference.
    return reference in answer


def grade(row: Prediction, options: ScoreOptions) -> RowGrade:
    """Grade one answer by the official rule."""
    answer, rule = extract_short_answer(row["response"])
    is_right = is_officially_right(answer, row["answer"], row["answer_type"])
    return RowGrade(
        verdict=CORRECT if is_right else WRONG,
        extracted=answer,
        reason=rule,
        groups={name: [row[name]] for name in ("subject", "level", "answer_type")},
    )


def _original_id(row: Prediction) -> str:
    """Return the id of the problem that a row asks a variant of.

    The `pid` of a row begins with the split of its variant: `sample_variant3/17` gives `17`.
    """
    _, _, problem_id = str(row["pid"]).rpartition("/")
    return problem_id


def _summary(
    rows: Sequence[Prediction], graded_answers: Sequence[GradedAnswer], options: ScoreOptions
) -> BenchmarkSummary:
    """Compute the worst case and the robustness.

    The worst case is the share of problems whose variants are all answered right. The robustness is
    the worst case divided by the accuracy over all variants. For example, two problems of ten
    variants, one with ten right and one with five, have the worst case 0.5, the accuracy 0.75 and
    the robustness 0.67. Several samples of a problem count as several problems.
    """
    # Whether the answers to the variants are right, by the problem and the number of the sample.
    variants_by_problem: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for graded in graded_answers:
        variants_by_problem[graded.problem_id, graded.sample].append(graded.correct)
    n_problems = len(variants_by_problem)
    worst_case = accuracy_of_share(
        [all(are_correct) for are_correct in variants_by_problem.values()],
        problem_ids=[problem_id for problem_id, _ in variants_by_problem],
    )
    accuracy = sum(graded.correct for graded in graded_answers) / len(graded_answers)
    robustness = worst_case["accuracy"] / accuracy if accuracy else None
    # With --limit, or where answers are missing, problems may have unequally many variants.
    n_variants = len(SPLIT_NAMES)
    n_incomplete = sum(
        len(are_correct) < n_variants for are_correct in variants_by_problem.values()
    )
    warnings: list[str] = []
    if n_incomplete:
        warnings.append(
            f"the worst case of {n_incomplete} of {n_problems} problems is over fewer "
            f"than the {n_variants} variants; --split all without --limit has all"
        )
    return BenchmarkSummary(
        metrics={"variants": {"worst_case": worst_case, "robustness": robustness}},
        warnings=warnings,
    )


def load(options: HubDataOptions) -> LoadedProblems:
    """Load the problems of one split, or of all splits for `--split all`.

    Each split has a variant of every problem under the same id, so that ids get the name of their
    split as a prefix here. A single file has no splits, and is loaded once.
    """
    problems: list[Problem] = []
    hashes: list[str] = []
    splits: Sequence[str] = (options.split,)
    if options.split == "all" and not Path(options.data).is_file():
        splits = SPLIT_NAMES
    for split in splits:
        loaded = load_problems(
            replace(options, split=split),
            required_columns=("id", *REQUIRED_COLUMNS),
            image_columns=("decoded_image", "image"),
            prompt=prompt,
            check=check_row,
            id_column="id",
            layout=DataLayout(our_names={"ground_truth": "answer", "knowledge_level": "level"}),
        )
        for problem in loaded.problems:
            fields = {**problem.fields, "pid": f"{split}/{problem.pid}"}
            problems.append(replace(problem, fields=fields))
        hashes.append(loaded.data_hash)
    return LoadedProblems(problems=problems, data_hash="+".join(hashes))


BENCHMARK = Benchmark(
    name="dynamath",
    split="all",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": "official"},
    data_options=HubDataOptions,
    check=check_row,
    fingerprint=("data_revision",),
    id_column="id",
    original_id=_original_id,
    summary=_summary,
    item=build_extraction_item,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
