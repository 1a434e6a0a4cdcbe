"""What a pool of groups carries from one generation to the next, and its file in a checkpoint.

Every rank has a state and a file of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from adora_vl.checkpoint.store import load_for_rank, save_for_rank
from adora_vl.data.images import open_picture, png_bytes
from adora_vl.data.shared_images import as_image_with_digest
from adora_vl.rollout.rollouts import (
    Call,
    DrawnProblem,
    FinishReason,
    Picture,
    Rollout,
    RolloutGroup,
    SamplingResult,
    Segment,
    StepKey,
)
from adora_vl.rollout.samplers import PendingSamples
from adora_vl.types import Row
from adora_vl.utils.errors import UserError

POOL_FILE_KIND = "pool"  # the files' kind in a checkpoint

# How many tokens each rollout of a group gets, by the group's number. None: rollouts are sampled to
# their ends. For example, {0: None, 1: 250}.
TokenLimits = dict[int, int | None]


@dataclass(frozen=True)
class PendingGeneration:
    """A generation whose rollouts were requested and have not been taken over into its groups."""

    row_numbers: tuple[int, ...]
    """The numbers of the rows that the data loader draws for it."""
    groups: tuple[RolloutGroup, ...]
    """Its groups, without the samples that were requested."""
    token_limits: TokenLimits
    """Tokens per rollout that were requested, by the number of the group; None: to the ends."""
    samples: PendingSamples
    """The samples of its unfinished rollouts, which may still be on their way."""

    def pack(self) -> dict[str, Any]:
        """Return the generation as a dict for a checkpoint, after waiting for its samples.

        Its keys are the names of the fields. The samples become a tuple of two parts: the optimizer
        step of the weights that sampled them, and the packed segments.
        """
        segments = [
            Segment(
                tokens=tuple(result.tokens),
                logps=tuple(result.logps),
                step=self.samples.step,
            )
            for result in self.samples.join()
        ]
        return {
            "row_numbers": self.row_numbers,
            "groups": [_pack_group(group) for group in self.groups],
            "token_limits": self.token_limits,
            "samples": (self.samples.step, [_pack_segment(segment) for segment in segments]),
        }

    @classmethod
    def unpack(
        cls, packed: dict[str, Any], image_by_digest: Mapping[str, Image.Image]
    ) -> PendingGeneration:
        """Return the generation that `pack` wrote; the rows of its groups are empty.

        `image_by_digest` has the pictures of the checkpoint.
        """
        step, packed_segments = packed["samples"]
        results = [
            SamplingResult(tokens=tokens.tolist(), logps=list(_unpack_logps(logps) or ()))
            for tokens, logps in packed_segments
        ]
        return cls(
            row_numbers=packed["row_numbers"],
            groups=tuple(_unpack_group(group, image_by_digest) for group in packed["groups"]),
            token_limits=packed["token_limits"],
            samples=PendingSamples(step, lambda: results),
        )


@dataclass(frozen=True)
class PoolState:
    """What the pool of one rank remembers from one generation to the next.

    It is immutable, and the pool replaces it. In a checkpoint it is a dict with the fields' names.
    The rows of groups are left out there, since the data set has them, and pictures are stored once
    by the digest of their content.
    """

    drawn_problems: tuple[DrawnProblem, ...] = ()
    """Problems that were drawn and have not begun, the oldest first."""
    waiting_groups: tuple[RolloutGroup, ...] = ()
    """Groups that have begun and were not learned from, the oldest first."""
    min_complete_groups: int = 0
    """How many of `waiting_groups` are complete on the rank with the fewest."""
    recent_lengths: tuple[tuple[int, ...], ...] = ()
    """For each of the last generations the tokens of each answer of all ranks."""
    pending_generations: tuple[PendingGeneration, ...] = ()
    """Generations whose rollouts were requested, from the present or next one on."""
    recent_signal_shares: tuple[float, ...] = ()
    """For each of the last generations the share of groups with signal, over all ranks."""

    def save(self, folder: Path, rank: int) -> None:
        """Write the state into a checkpoint, as the file of this rank.

        Rows are left out, since the data set has them by their numbers. A picture that several
        rollouts show is written once.

        Args:
            folder: the folder of the checkpoint.
            rank: the number of this process.
        """
        groups = [*self.waiting_groups]
        for generation in self.pending_generations:
            groups += generation.groups
        image_by_digest = {
            picture.digest: picture.image
            for group in groups
            for rollout in group.rollouts
            for picture in rollout.pictures
        }
        encoded_by_digest = {
            digest: torch.frombuffer(bytearray(png_bytes(image)), dtype=torch.uint8)
            for digest, image in image_by_digest.items()
        }
        content: dict[str, Any] = {
            "drawn_problems": [asdict(problem) for problem in self.drawn_problems],
            "waiting_groups": [_pack_group(group) for group in self.waiting_groups],
            "min_complete_groups": self.min_complete_groups,
            "recent_lengths": self.recent_lengths,
            "recent_signal_shares": self.recent_signal_shares,
            "images": encoded_by_digest,
            "pending_generations": [generation.pack() for generation in self.pending_generations],
        }
        save_for_rank(folder, name=POOL_FILE_KIND, rank=rank, content=content)

    @classmethod
    def load(cls, checkpoint: Path, rank: int, num_ranks: int) -> PoolState:
        """Return the state that `save` wrote into a checkpoint; an empty state if it wrote none.

        Args:
            checkpoint: the folder of the checkpoint.
            rank: the rank whose state is read.
            num_ranks: the number of processes now.

        Returns:
            The state; the rows of its groups are empty. If another number of processes wrote it,
            drawn problems and pending generations are left out, since they belong to those ranks.

        Raises:
            UserError: another number of processes wrote unfinished rollouts.
        """
        content_of_first_rank = load_for_rank(checkpoint, POOL_FILE_KIND, rank=0)
        if content_of_first_rank is None:
            return cls()
        num_ranks_before = len(list(checkpoint.glob(f"{POOL_FILE_KIND}-*.pt")))
        # All ranks begin rollouts in the same generations, so the first one tells for all.
        if num_ranks_before != num_ranks and _has_begun_rollouts(content_of_first_rank):
            raise UserError(
                f"resume_from_checkpoint: {str(checkpoint)!r} has unfinished rollouts "
                f"(adora_rollouts.budget) of {num_ranks_before} processes, now {num_ranks}; start as "
                "many as before"
            )
        # A rank that did not exist before takes what all ranks have in common from the first one.
        content = load_for_rank(checkpoint, POOL_FILE_KIND, rank) or content_of_first_rank
        if num_ranks_before != num_ranks:
            # Each earlier rank had its own drawn problems and pending generations. They do not fit
            # the present ranks. The problems come again in a later epoch.
            content = {**content, "drawn_problems": (), "pending_generations": ()}
        image_by_digest = {
            digest: _decode_image(encoded) for digest, encoded in content["images"].items()
        }
        waiting = [_unpack_group(group, image_by_digest) for group in content["waiting_groups"]]
        pending = [
            PendingGeneration.unpack(generation, image_by_digest)
            for generation in content["pending_generations"]
        ]
        return cls(
            waiting_groups=tuple(waiting),
            drawn_problems=tuple(_unpack_problem(problem) for problem in content["drawn_problems"]),
            pending_generations=tuple(pending),
            min_complete_groups=content["min_complete_groups"],
            recent_lengths=content["recent_lengths"],
            recent_signal_shares=content["recent_signal_shares"],
        )


def _has_begun_rollouts(content: Mapping[str, Any]) -> bool:
    """Return whether a rank's file has rollouts that have begun and were not learned from.

    Rollouts of waiting groups have begun. A rollout of a pending generation has begun if it has a
    segment, that is, some tokens.

    `content`: the dict that `PoolState.save` wrote.
    """
    if content["waiting_groups"]:
        return True
    for generation in content["pending_generations"]:
        for group in generation["groups"]:
            if any(rollout["segments"] for rollout in group["rollouts"]):
                return True
    return False


def _pack_group(group: RolloutGroup) -> dict[str, Any]:
    """Return a group as a dict for a checkpoint; `_unpack_group` undoes it.

    Its row is left out, and read from the data set again by its number. Tokens and
    log-probabilities become tensors with 4 bytes per number. A picture is named by its digest.
    """
    rollouts = [
        {
            # `step`: the optimizer step of the policy that sampled the segment.
            "segments": [(*_pack_segment(segment), segment.step) for segment in rollout.segments],
            "finish_reason": str(rollout.finish_reason),
            "saw_trainer_images": rollout.saw_trainer_images,
            "pictures": [(picture.digest, picture.segment_number) for picture in rollout.pictures],
            "calls": [asdict(call) for call in rollout.calls],
            "environment": rollout.environment,
        }
        for rollout in group.rollouts
    ]
    return {
        "problem": asdict(group.problem),
        "start_generation": group.start_generation,
        "rollouts": rollouts,
    }


def _unpack_problem(packed: Mapping[str, Any]) -> DrawnProblem:
    """Return the problem that `asdict` turned into a mapping."""
    return DrawnProblem(**{**packed, "key": StepKey(**packed["key"])})


def _decode_image(encoded: torch.Tensor) -> Image.Image:
    """Return the picture whose bytes a checkpoint has as a tensor."""
    file = io.BytesIO(encoded.numpy().tobytes())
    image: Image.Image = as_image_with_digest(open_picture(file))
    return image


def _pack_segment(segment: Segment) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens and log-probabilities of a segment as tensors.

    NaN stands for an unknown log-probability: (-0.1, None) becomes (-0.1, NaN). A segment that a
    tool has answered has none at all, and gets None in place of the second tensor.
    """
    tokens = torch.tensor(segment.tokens, dtype=torch.int32)
    if segment.logps is None:
        return tokens, None
    logps = [torch.nan if logp is None else logp for logp in segment.logps]
    return tokens, torch.tensor(logps, dtype=torch.float32)


def _unpack_group(
    packed_group: dict[str, Any], image_by_digest: Mapping[str, Image.Image]
) -> RolloutGroup:
    """Return the group that `_pack_group` wrote, with an empty row.

    A checkpoint has no rows: the pool reads them from the data set again. `image_by_digest` has the
    pictures of the checkpoint.
    """
    rollouts = []
    for packed_rollout in packed_group["rollouts"]:
        segments = tuple(
            Segment(tokens=tuple(tokens.tolist()), logps=_unpack_logps(logps), step=step)
            for tokens, logps, step in packed_rollout["segments"]
        )
        pictures = tuple(
            Picture(digest=digest, image=image_by_digest[digest], segment_number=segment_number)
            for digest, segment_number in packed_rollout["pictures"]
        )
        rollouts.append(
            Rollout(
                segments=segments,
                finish_reason=FinishReason(packed_rollout["finish_reason"]),
                saw_trainer_images=packed_rollout["saw_trainer_images"],
                pictures=pictures,
                calls=tuple(Call(**call) for call in packed_rollout["calls"]),
                environment=packed_rollout["environment"],
            )
        )
    return RolloutGroup(
        problem=_unpack_problem(packed_group["problem"]),
        row=Row(),
        start_generation=packed_group["start_generation"],
        rollouts=tuple(rollouts),
    )


def _unpack_logps(logps: torch.Tensor | None) -> tuple[float | None, ...] | None:
    """Return the log-probabilities that `_pack_segment` wrote: NaN becomes None again."""
    if logps is None:
        return None
    return tuple(None if math.isnan(logp) else logp for logp in logps.tolist())
