"""Warns where not one of the first rollouts of a run is right.

The warning shows reference answers beside what was read of the rollouts.

A reference answer that no answer can meet trains at reward 0 for ever, and looks like a problem that
is too hard.
"""

import sys
from collections.abc import Sequence

from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Row
from adora_vl.utils.cli import shown

_SHOWN_ROWS = 5
_SHOWN_CHARS = 60  # of an answer


class FirstAnswers:
    """Looks at the first generation of a training, and at no other."""

    def __init__(self) -> None:
        self.looked = False

    def look(self, rows: Sequence[Row], facts: RolloutFacts) -> None:
        """Print to standard error what was read of the first generation where nothing is right.

        Args:
            rows: this rank's row of each rollout, (B,). The main process alone calls this, so its
                rollouts stand first in the columns of `facts`.
            facts: of all ranks.
        """
        if self.looked:
            return
        self.looked = True
        lines = warning_lines(rows, facts)
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)


def warning_lines(rows: Sequence[Row], facts: RolloutFacts) -> list[str]:
    """Return a warning if no first rollout is right.

    It is empty if one is, or if no reward function shows its verdicts and what it has extracted.
    """
    verdicts = facts.extra_columns.get("verdict")
    extracted_answers = facts.extra_columns.get("extracted")
    if not verdicts or extracted_answers is None or "correct" in verdicts:
        return []
    reasons = facts.extra_columns.get("reason", [""] * len(verdicts))
    read_by_reference: dict[str, str] = {}
    for row, extracted_answer, reason in zip(rows, extracted_answers, reasons, strict=False):
        reference_answer = shown(row.get("answer"), _SHOWN_CHARS)
        extracted_text = (
            "no answer" if extracted_answer is None else shown(extracted_answer, _SHOWN_CHARS)
        )
        read_by_reference.setdefault(str(reference_answer), f"{extracted_text} ({reason})")
    examples = [
        f"  reference answer {reference_answer}, read {extracted_text}"
        for reference_answer, extracted_text in list(read_by_reference.items())[:_SHOWN_ROWS]
    ]
    return [
        f"warning: none of the first {len(verdicts)} rollouts is right; see whether these reference "
        "answers can be met:",
        *examples,
    ]
