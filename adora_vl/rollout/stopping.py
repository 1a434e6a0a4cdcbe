"""What ends an answer, for every kind of sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adora_vl.rollout.rollouts import Rollout


@dataclass(frozen=True)
class StopCriteria:
    """The tokens and strings that end an answer, for every kind of sampler."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()  # vLLM's `stop`
    decode: Callable[[Sequence[int]], str] = str  # token ids to the text that strings are sought in

    @classmethod
    def of(
        cls,
        tokens: Iterable[int],
        generation_kwargs: Mapping[str, Any],
        decode: Callable[[Sequence[int]], str],
    ) -> StopCriteria:
        """Return the criteria of a run.

        Args:
            tokens: that end a turn.
            generation_kwargs: the key of the run, which may name further tokens and strings.
            decode: makes the texts of token ids.
        """
        stop = generation_kwargs.get("stop") or ()
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        further_tokens = generation_kwargs.get("stop_token_ids") or ()
        return cls(frozenset({*tokens, *further_tokens}), strings, decode)

    def ended(self, ids: Sequence[int], text: str) -> bool:
        """Return whether an answer of these tokens and this text has ended by itself.

        It has if it is empty, or if its last token ends it or completes a string. An answer that
        was stopped at its limit, or because it repeats itself, has not.
        """
        if not ids or ids[-1] in self.tokens:
            return True
        return any(
            string in text and string not in self.decode(ids[:-1]) for string in self.strings
        )

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether an answer of these tokens, decoded here, has ended by itself."""
        return self.ended(ids, self.decode(ids))

    def has_end(self, rollout: Rollout, text: str) -> bool:
        """Return whether a rollout whose last turn has this text has come to its end by itself.

        False for a rollout that stopped at an unanswered tool call or for lack of context, whatever
        its last token is.
        """
        return not rollout.finish_reason.is_unanswered and self.ended(
            rollout.last_turn_tokens, text
        )
