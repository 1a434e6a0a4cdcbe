"""Reads the log-probabilities of an engine."""

import math


def engine_logp(value: float | None) -> float:
    """Return the log-probability that an engine has returned for a token it was asked for.

    A value that is no finite number becomes minus infinity. Overflowing weights give NaN, which
    TRL's client reads as None, but elsewhere in this package None and NaN mean that the engine was
    not asked, and such tokens would pass as agreement.
    """
    return -math.inf if value is None or not math.isfinite(value) else value
