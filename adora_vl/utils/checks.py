"""What was looked at and what came out: a line of the doctor's table, and the table."""

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
    """What was looked at, what came out, and for a failure what to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

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


_MARKS = {Status.PASSED: "ok", Status.SKIPPED: "--", Status.FAILED: "FAIL"}


def table(checks: Sequence[Check]) -> str:
    """Return the table of checks for a person.

    It has one line per check, the remedy below a failure, and the number of checks of each kind.
    """
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.status]:>4}  {check.name:{width}}  {check.detail}")
        if check.remedy:
            lines.append(f"{'':{width + 6}}  -> {check.remedy}")
    counts = ", ".join(
        f"{sum(check.status is status for check in checks)} {status}" for status in Status
    )
    return "\n".join([*lines, "", counts])


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return the same as objects for JSON."""
    return [asdict(check) for check in checks]


def is_table(content: object) -> bool:
    """Return whether the content of a JSON file was written by `as_json`."""
    return isinstance(content, list) and all(
        entry.keys() == Check.__dataclass_fields__.keys() for entry in content
    )


def is_healthy(checks: Sequence[Check]) -> bool:
    """Return whether no check has failed."""
    return all(check.status is not Status.FAILED for check in checks)
