"""`python -m eval.knights`: knights-and-knaves puzzles."""

from adora_vl.utils.cli import imports

with imports():
    from adora_vl.evals.options import ScoreOptions
    from adora_vl.evals.prepared import load
    from adora_vl.evals.records import Benchmark, Prediction, RowGrade
    from adora_vl.rewards.knights import knights_verdict, roles_in


def grade(row: Prediction, options: ScoreOptions) -> RowGrade:
    """Return the verdict on a row, in the groups of its number of people."""
    verdict, extracted = knights_verdict(row["response"], row["answer"])
    reason = {"correct": "everyone_right", "wrong": "someone_wrong"}.get(verdict, "no_whole_answer")
    family = str((row.get("metadata") or {}).get("family") or "")
    groups = {}
    number, _, word = family.partition(" ")
    # The published model was trained on at most 5 people, which are its ID.
    if word == "people" and number.isdecimal():
        half = "2 to 5 people (ID)" if int(number) <= 5 else "6 to 8 people (OOD)"
        groups = {"people": [family], "half": [half]}
    return RowGrade(verdict=verdict, extracted=extracted, reason=reason, groups=groups)


def _check(row: Prediction) -> str | None:
    """Return what makes a row unusable: a reference answer without roles; else None."""
    if not roles_in(row["answer"]):
        return f"has answer = {row['answer']!r:.60}, which names nobody as a knight or a knave"
    return None


BENCHMARK = Benchmark(
    name="knights",
    split="test",
    load=load,
    grade=grade,
    rules=lambda options: {"rules": "everyone's kind"},
    check=_check,
)
if __name__ == "__main__":
    with imports():
        from eval.command import main
    raise SystemExit(main(BENCHMARK))
