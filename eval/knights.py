"""`python -m eval.knights`: knights-and-knaves puzzles."""

from adora_vl.evals.options import ScoreOptions
from adora_vl.evals.prepared import load
from adora_vl.evals.records import Benchmark, Prediction, RowGrade
from adora_vl.rewards.knights import knights_verdict, parse_roles


def grade(row: Prediction, options: ScoreOptions) -> RowGrade:
    """Grade one answer, which is right if it says of everyone whether they are knight or knave.

    Answers are counted in groups by the number of people in the puzzle, and in two halves: the
    numbers that the published model was trained on (ID, in distribution), and larger ones (OOD).
    """
    verdict, extracted = knights_verdict(row["response"], row["answer"])
    reason_by_verdict = {"correct": "everyone_right", "wrong": "someone_wrong"}
    metadata = row.get("metadata") or {}
    family = str(metadata.get("family") or "")  # such as `3 people`
    groups = {}
    number, _, noun = family.partition(" ")
    if noun == "people" and number.isdecimal():
        half = "2 to 5 people (ID)" if int(number) <= 5 else "6 to 8 people (OOD)"
        groups = {"people": [family], "half": [half]}
    return RowGrade(
        verdict=verdict,
        extracted=extracted,
        reason=reason_by_verdict.get(verdict, "no_whole_answer"),
        groups=groups,
    )


def _check_row(row: Prediction) -> str | None:
    """Return what is wrong with a row: its reference answer names no role; None where it does."""
    if not parse_roles(row["answer"]):
        return f"has answer = {row['answer']!r:.60}, which names nobody as a knight or a knave"
    return None


BENCHMARK = Benchmark(
    name="knights",
    split="test",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": "everyone's kind"},
    check=_check_row,
)
if __name__ == "__main__":
    from eval.command import main

    raise SystemExit(main(BENCHMARK))
