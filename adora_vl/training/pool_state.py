"""What a pool of groups carries from one generation to the next, and its file in a checkpoint: one
of each rank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from adora_vl.checkpoint.store import load_of_rank, save_of_rank
from adora_vl.data.images import kept, open_picture, png_bytes
from adora_vl.rollout.rollouts import (
    Call,
    DrawnProblem,
    Picture,
    Rollout,
    RolloutGroup,
    SamplingResult,
    Segment,
)
from adora_vl.rollout.samplers import PendingSamples
from adora_vl.types import Row
from adora_vl.utils.errors import UserError

FILES = "pool"  # in a checkpoint


@dataclass(frozen=True)
class ComingGeneration:
    """One that servers were asked for before it is needed."""

    numbers: tuple[int, ...]  # of the rows that the data loader draws for it
    groups: tuple[RolloutGroup, ...]  # without what was asked for
    limits: dict[int, int | None]  # tokens that were asked for, by the number of the group
    ticket: PendingSamples  # for the rollouts that have not ended

    def packed(self) -> dict[str, Any]:
        spans = [
            Segment(tuple(one.tokens), tuple(one.logps), self.ticket.step)
            for one in self.ticket.join()
        ]
        answers = [_tensors(span) for span in spans]
        return {
            **vars(self),
            "groups": [*map(_packed, self.groups)],
            "ticket": (self.ticket.step, answers),
        }

    @classmethod
    def unpacked(
        cls, packed: dict[str, Any], images: Mapping[str, Image.Image]
    ) -> ComingGeneration:
        step, found = packed["ticket"]
        answers = [
            SamplingResult(tokens.tolist(), list(_logps(logps) or ())) for tokens, logps in found
        ]
        groups = tuple(_unpacked(one, images) for one in packed["groups"])
        return cls(**{**packed, "groups": groups, "ticket": PendingSamples(step, lambda: answers)})


@dataclass(frozen=True)
class PoolState:
    """Of one rank; replaced, and never changed in place."""

    drawn: tuple[DrawnProblem, ...] = ()  # problems that have not begun, the oldest first
    groups: tuple[
        RolloutGroup, ...
    ] = ()  # those that have begun and were not learned from, the oldest first
    complete: int = 0  # how many of `groups` are, on the rank with the fewest
    lengths: tuple[
        tuple[int, ...], ...
    ] = ()  # tokens of the answers of the last generations, of all ranks
    coming: tuple[ComingGeneration, ...] = ()  # from the next one on
    signal: tuple[
        float, ...
    ] = ()  # the share of groups with it in the last generations, of all ranks

    def save(self, folder: Path, rank: int) -> None:
        """Into a checkpoint; problems by their numbers, since the data set has them."""
        drawn = [vars(problem) for problem in self.drawn]
        groups = [*self.groups, *(group for one in self.coming for group in one.groups)]
        shown = [
            picture
            for group in groups
            for rollout in group.rollouts
            for picture in rollout.pictures
        ]
        images = {picture.digest: picture.image for picture in shown}
        encoded = {
            key: torch.frombuffer(bytearray(png_bytes(one)), dtype=torch.uint8)
            for key, one in images.items()
        }
        content: dict[str, Any] = {
            "drawn": drawn,
            "groups": [*map(_packed, self.groups)],
        }
        content |= {
            "complete": self.complete,
            "lengths": self.lengths,
            "signal": self.signal,
            "images": encoded,
        }
        save_of_rank(
            folder,
            kind=FILES,
            rank=rank,
            content={**content, "coming": [one.packed() for one in self.coming]},
        )

    @classmethod
    def load(cls, checkpoint: Path, rank: int, ranks: int) -> PoolState:
        """What `save` wrote, the groups without their rows; an empty one where it wrote nothing.

        Raises `UserError` where another number of processes has rollouts that go on.
        """
        first = load_of_rank(checkpoint, FILES, 0)
        if first is None:
            return cls()
        before = len(list(checkpoint.glob(f"{FILES}-*.pt")))
        asked = [group for one in first["coming"] for group in one["groups"]]
        paused = first["groups"] or any(
            one["spans"] for group in asked for one in group["rollouts"]
        )
        if paused and before != ranks:
            raise UserError(
                f"resume_from_checkpoint: {str(checkpoint)!r} has unfinished rollouts "
                f"(adora_rollouts.budget) of {before} processes, now {ranks}; start as many as "
                "before"
            )
        found = load_of_rank(checkpoint, FILES, rank) or first
        if (
            before != ranks
            # what was drawn and asked for belongs to those processes; it comes again in a later
            # epoch
        ):
            found = {**found, "drawn": (), "coming": ()}
        images = {digest: _image_in(encoded) for digest, encoded in found["images"].items()}
        groups = tuple(_unpacked(one, images) for one in found["groups"])
        drawn = tuple(DrawnProblem(**one) for one in found["drawn"])
        coming = tuple(ComingGeneration.unpacked(one, images) for one in found["coming"])
        return cls(
            drawn,
            groups,
            found["complete"],
            found["lengths"],
            coming,
            found["signal"],
        )


def _packed(group: RolloutGroup) -> dict[str, Any]:
    """As tensors: a token with its log-probability, float32 as of engines, takes 8 bytes.

    Of pictures only digests.
    """
    rollouts = []
    for rollout in group.rollouts:
        facts = {**vars(rollout), "spans": [(*_tensors(span), span.step) for span in rollout.spans]}
        facts["pictures"] = [(picture.digest, picture.span) for picture in rollout.pictures]
        rollouts.append({**facts, "calls": [vars(call) for call in rollout.calls]})
    return {"problem": vars(group.problem), "began": group.began, "rollouts": rollouts}


def _image_in(encoded: torch.Tensor) -> Image.Image:
    image: Image.Image = kept(open_picture(io.BytesIO(encoded.numpy().tobytes())))
    return image


def _tensors(span: Segment) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens = torch.tensor(span.tokens, dtype=torch.int32)
    if span.logps is None:
        return tokens, None
    return tokens, torch.tensor(
        [torch.nan if logp is None else logp for logp in span.logps], dtype=torch.float32
    )


def _unpacked(packed: dict[str, Any], images: Mapping[str, Image.Image]) -> RolloutGroup:
    rollouts = []
    for one in packed["rollouts"]:
        spans = tuple(
            Segment(tuple(tokens.tolist()), _logps(logps), step)
            for tokens, logps, step in one["spans"]
        )
        pictures = tuple(Picture(digest, images[digest], span) for digest, span in one["pictures"])
        calls = tuple(Call(**call) for call in one["calls"])
        rollouts.append(Rollout(**{**one, "spans": spans, "pictures": pictures, "calls": calls}))
    return RolloutGroup(
        problem=DrawnProblem(**packed["problem"]),
        row=Row(),
        began=packed["began"],
        rollouts=tuple(rollouts),
    )


def _logps(logps: torch.Tensor | None) -> tuple[float | None, ...] | None:
    if logps is None:
        return None
    return tuple(None if math.isnan(logp) else logp for logp in logps.tolist())
