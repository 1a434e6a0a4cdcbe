"""A claim with its verdict.

The verdicts stand in a record as they are written here, and a page shows them in colours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from adora_vl.geometry.claims import Claim

ClaimVerdict = Literal["new", "given", "nothing", "again", "false", "follows", "open", "unread"]
TRUE_VERDICTS: tuple[ClaimVerdict, ...] = ("new", "given", "nothing", "again")


@dataclass(frozen=True)
class CheckedClaim:
    """A claim with what the figure says of it.

    `verdict` is one of these. True claims are `new`; `given`, a fact as it stands; `nothing`, an
    identity or arithmetic on what is known; or `again`, said before. Others are `false`; `follows`,
    false as well, and right if an earlier false claim were true, so that one error counts once;
    `open`, where the facts do not say; or `unread`, where it was not understood. `is_answer`: it
    says what is asked for, as a number.
    """

    claim: Claim
    verdict: ClaimVerdict
    is_answer: bool = False

    @property
    def is_true(self) -> bool:
        """Whether it holds in the figure."""
        return self.verdict in TRUE_VERDICTS

    @property
    def is_step(self) -> bool:
        """Whether it is a step of a working: true, new, and not the answer itself."""
        return self.verdict == "new" and not self.is_answer
