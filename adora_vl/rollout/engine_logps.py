"""How the log-probabilities of an engine are read."""

import math


def engine_logp(value: float | None) -> float:
    """What an engine that was asked for the log-probability of a token has said.

    What is no finite number is minus infinity: overflowing weights give NaN, which TRL's client
    reads as None. None and NaN mean here that nobody was asked, and would count as agreement.
    """
    return -math.inf if value is None or not math.isfinite(value) else value
