"""The results of checks, such as those of the doctor, and the table that shows them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The status of a check, in the order of how bad it is."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    name: str
    """What was looked at."""
    status: Status
    detail: str
    """What came out."""
    remedy: str = ""
    """What to do about a failure; empty for any other status."""

    def __post_init__(self) -> None:
        assert self.remedy or self.status is not Status.FAILED, (
            f"{self.name} fails without a remedy"
        )


def passed(name: str, detail: str) -> Check:
    """Return the result of a check that found nothing wrong."""
    return Check(name, Status.PASSED, detail)


def skipped(name: str, why: str) -> Check:
    """Return the result of a check that was not run, and why."""
    return Check(name, Status.SKIPPED, why)


def failed(name: str, detail: str, remedy: str) -> Check:
    """Return the result of a check that found a fault, and its remedy."""
    return Check(name=name, status=Status.FAILED, detail=detail, remedy=remedy)


_MARK_BY_STATUS = {Status.PASSED: "ok", Status.SKIPPED: "--", Status.FAILED: "FAIL"}


def format_checks(checks: Sequence[Check]) -> str:
    """Return the results of checks as text: a line each, and the number of checks by status.

    The remedy of a failure stands in a line below it. For example:

          ok  torch  2.10
        FAIL  gpu    none
                     -> set use_cpu: true

        1 passed, 0 skipped, 1 failed
    """
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{_MARK_BY_STATUS[check.status]:>4}  {check.name:{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':{width + 6}}  -> {check.remedy}")
    count_by_status = Counter(check.status for check in checks)
    counts = ", ".join(f"{count_by_status[status]} {status}" for status in Status)
    return "\n".join([*lines, "", counts])


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return the results of checks as objects for a JSON file."""
    return [asdict(check) for check in checks]


def is_checks_json(content: object) -> bool:
    """Return whether the content of a JSON file was written by `as_json`.

    It may raise `AttributeError` for a list of something else than objects.
    """
    fields = Check.__dataclass_fields__.keys()
    return isinstance(content, list) and all(entry.keys() == fields for entry in content)


def is_healthy(checks: Sequence[Check]) -> bool:
    """Return whether no check has failed."""
    return all(check.status is not Status.FAILED for check in checks)
