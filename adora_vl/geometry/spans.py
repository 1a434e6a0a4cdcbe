"""Whether gradients are sums of multiples of other ones.

A gradient in the span of others says nothing that these do not say, for a small movement of the
figure. Rows are of length 1 or 0, so that shares of them can be compared with one bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adora_vl.geometry.layout import Vector

MAX_SHARE_OUTSIDE_SPAN = 1e-5  # share of a gradient that may lie outside of a span


def is_parallel_to_any(row: Vector, rows: Sequence[Vector]) -> bool:
    """Tell whether one of the rows, all of length 1, has the same direction or the opposite one."""
    # The product is the cosine, which is about 1 - t²/2 for a small angle t, while the share
    # outside is about t. So the share has to be squared here.
    return any(abs(float(row @ candidate)) > 1 - MAX_SHARE_OUTSIDE_SPAN**2 for candidate in rows)


def are_in_span(rows: Sequence[Vector], span: Sequence[Vector]) -> bool:
    """Tell whether each row, of length 1 or 0, is a sum of multiples of the rows of `span`."""
    return all(is_in_span(row, span) for row in rows)


def is_in_span(row: Vector, span: Sequence[Vector]) -> bool:
    """Tell whether a row of length 1 or 0 is a sum of multiples of the rows of `span`."""
    return not row.any() or length_outside(row, span) < MAX_SHARE_OUTSIDE_SPAN


def length_outside(row: Vector, span: Sequence[Vector]) -> float:
    """Return the length of the part of a row that is no sum of multiples of the rows of `span`.

    It is the least length of x1 * row1 + x2 * row2 + ... - row for any factors x. For example, of
    (3, 4) and the one row (1, 0) it is 4.
    """
    if not span:
        return float(np.linalg.norm(row))
    matrix = np.stack(span, axis=1)
    factors, *_ = np.linalg.lstsq(matrix, row, rcond=1e-9)
    return float(np.linalg.norm(matrix @ factors - row))
