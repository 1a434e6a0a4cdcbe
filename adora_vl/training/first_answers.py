"""Warns where not one of the first rollouts of a run is right.

The warning shows reference answers beside what was read of the rollouts.

A reference answer that no answer can meet trains at reward 0 for ever, and looks like a problem
that is too hard.
"""

import sys
from collections.abc import Sequence

from adora_vl.training.rollout_facts import RolloutFacts
from adora_vl.types import Row
from adora_vl.utils.cli import short_repr

_MAX_EXAMPLES = 5  # how many reference answers the warning shows
_MAX_ANSWER_CHARS = 60  # a longer answer is cut in the warning


class FirstAnswers:
    """Warns once if no rollout of the first generation of a training is right."""

    def __init__(self) -> None:
        self.has_checked = False

    def warn_if_none_is_right(self, rows: Sequence[Row], facts: RolloutFacts) -> None:
        """Print a warning to standard error if no rollout of the first generation is right.

        Later calls do nothing. Only the main process calls this.

        Args:
            rows: the row of each rollout of this rank.
            facts: what is known of the rollouts of all ranks, those of this rank first.
        """
        if self.has_checked:
            return
        self.has_checked = True
        lines = warning_lines(rows, facts)
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)


def warning_lines(rows: Sequence[Row], facts: RolloutFacts) -> list[str]:
    """Return a warning that no rollout is right, with some reference answers and extracted answers.

    For example, one of its lines is `  reference answer 12, read 7 (wrong number)`. The result is
    empty if one rollout is right. It is also empty if no reward function logs the columns `verdict`
    and `extracted` (TRL's `log_extra`), which tell that.

    Args:
        rows: the row of each rollout of the main process.
        facts: what is known of the rollouts of all ranks, those of the main process first.
    """
    verdicts = facts.extra_columns.get("verdict")
    extracted_answers = facts.extra_columns.get("extracted")
    if not verdicts or extracted_answers is None or "correct" in verdicts:
        return []
    reasons = facts.extra_columns.get("reason", [""] * len(verdicts))
    # By the reference answer, what was read of the first rollout of the problem.
    read_by_reference: dict[str, str] = {}
    # Not strict: the columns go on with the rollouts of other ranks, whose rows are not here.
    for row, extracted_answer, reason in zip(rows, extracted_answers, reasons, strict=False):
        reference_answer = short_repr(row.get("answer"), _MAX_ANSWER_CHARS)
        extracted_text = "no answer"
        if extracted_answer is not None:
            extracted_text = short_repr(extracted_answer, _MAX_ANSWER_CHARS)
        read_by_reference.setdefault(str(reference_answer), f"{extracted_text} ({reason})")
    examples = [
        f"  reference answer {reference_answer}, read {extracted_text}"
        for reference_answer, extracted_text in list(read_by_reference.items())[:_MAX_EXAMPLES]
    ]
    return [
        f"warning: none of the first {len(verdicts)} rollouts is right; see whether these reference "
        "answers can be met:",
        *examples,
    ]
