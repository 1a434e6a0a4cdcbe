"""Compares the time of ranks in lockstep with that of a run in which no rank waits.

Ranks in lockstep wait for the one with the longest group.

`python -m benchmarks.lockstep` simulates it: lognormal lengths, a micro-batch takes as long as its
most tokens on any rank. The last columns fill micro-batches up to the memory of one full group.
`torchrun --nproc_per_node 2 -m benchmarks.lockstep --measured` times the tiny model under ZeRO-3,
in three orders of the same groups.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch

from adora_vl.models.activations import DtypeBytes
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.models.peak_memory import ActivationMemory
from adora_vl.models.shape import config_for_planning, model_shape
from adora_vl.training.micro_batch_memory import MicroBatchMemory, SubgroupSize
from adora_vl.training.micro_batches import training_order
from adora_vl.training.rank_balance import plan_moves

# The tokens of each rank's subgroups, in the order in which they are learned from
LengthsByRank = list[list[int]]


@dataclass(frozen=True)
class DrawnLengths:
    """A log-normal distribution of the lengths of rollouts, in tokens."""

    of_prompts: float  # sigma of the mean lengths of prompts
    of_rollouts: float  # sigma of the rollouts of one prompt
    prompt: int = 1580  # tokens of a prompt
    mean: int = 1000  # of a rollout
    longest: int = 4096  # the limit of a rollout

    def draw(self, rng: random.Random, rollouts: int) -> int:
        """Return the tokens of one group: its prompt and all of its rollouts."""
        return self.draw_group(rng, rollouts).tokens(shares_prompt=True)

    def draw_group(self, rng: random.Random, rollouts: int) -> SubgroupSize:
        """Return the sizes of one group."""
        mean = self.mean * _lognormal(rng, self.of_prompts)
        answers = [
            min(self.longest, math.ceil(mean * _lognormal(rng, self.of_rollouts)))
            for _ in range(rollouts)
        ]
        return SubgroupSize(
            rows=rollouts,
            prompt_tokens=self.prompt,
            longest_completion=max(answers),
            completion_tokens=sum(answers),
        )


ACTIVATIONS_OF_7B = ActivationMemory(
    model_shape(config_for_planning("Qwen/Qwen2.5-VL-7B-Instruct")[0]),
    DtypeBytes(compute_bytes=2, residual_bytes=2),
)
DRAWN_CASES = (DrawnLengths(0.3, 0.4), DrawnLengths(0.5, 0.5), DrawnLengths(0.7, 0.6))
# The prompts and answers of docs/speed.md, with the limits of the 3B and the 7B recipe
MEASURED_CASES = (
    DrawnLengths(0.3, 0.5, prompt=1079, mean=468, longest=2048),
    DrawnLengths(0.3, 0.5, prompt=1079, mean=468, longest=4096),
)


def _lognormal(rng: random.Random, sigma: float) -> float:
    """Draw from a log-normal distribution of mean 1: exp(mu + sigma²/2) is 1 for mu = -sigma²/2."""
    return rng.lognormvariate(-(sigma**2) / 2, sigma)


def shuffle_each_rank(subgroups: LengthsByRank, rng: random.Random) -> LengthsByRank:
    """Return the subgroups of each rank in a random order of its own."""
    return [rng.sample(rank_tokens, len(rank_tokens)) for rank_tokens in subgroups]


def order_by_length(subgroups: LengthsByRank, rng: random.Random) -> LengthsByRank:
    """Return the subgroups of each rank in order of length, as where groups cannot move."""
    return [
        [
            rank_tokens[number]
            for number in training_order(
                range(len(rank_tokens)), tokens_by_subgroup=rank_tokens, optimizer_steps=1, seed=""
            )
        ]
        for rank_tokens in subgroups
    ]


def move_groups(subgroups: LengthsByRank, rng: random.Random) -> LengthsByRank:
    """Return the subgroups as a run has them: moved between ranks, then ordered by length."""
    subgroups_of_rank = [
        {(rank, number): tokens for number, tokens in enumerate(rank_tokens)}
        for rank, rank_tokens in enumerate(subgroups)
    ]
    for source, number, target in plan_moves(
        [dict(enumerate(rank_tokens)) for rank_tokens in subgroups]
    ):
        subgroups_of_rank[target][source, number] = subgroups_of_rank[source].pop((source, number))
    return order_by_length([list(rank_tokens.values()) for rank_tokens in subgroups_of_rank], rng)


@dataclass(frozen=True)
class FilledGeneration:
    """A generation whose micro-batches are filled up to the planned memory."""

    lockstep_ratio: float  # the time in lockstep over the ideal
    micro_batches: float  # over those of one group each


def fill_micro_batches(groups: Sequence[Sequence[SubgroupSize]], longest: int) -> FilledGeneration:
    """Fill micro-batches as a run of the 7B model under ZeRO-3 does, with answers up to `longest`.

    `groups`: those of each rank, equally many.
    """
    tokens = [
        [group.prompt_tokens + group.completion_tokens for group in rank_groups]
        for rank_groups in groups
    ]
    by_number = [dict(enumerate(rank_groups)) for rank_groups in groups]
    tokens_by_number = [dict(enumerate(rank_groups)) for rank_groups in tokens]
    # A group that moves gets a negative number, which no group of the other rank has.
    for number, (source, subgroup, target) in enumerate(plan_moves(tokens_by_number)):
        by_number[target][-1 - number] = by_number[source].pop(subgroup)
    ordered_groups = [
        sorted(
            rank_groups.values(), key=lambda group: -group.prompt_tokens - group.completion_tokens
        )
        for rank_groups in by_number
    ]
    room = MicroBatchMemory(
        make_activation_memory=lambda: ACTIVATIONS_OF_7B,
        longest_completion=longest,
        shares_prompts=lambda: True,
        masks_padding=True,
    )
    count = len(ordered_groups[0])
    parts = room.split(ordered_groups, range(count), max_subgroups=1)
    seconds = 0
    for part in parts:
        seconds += max(
            sum(
                group.prompt_tokens + group.completion_tokens
                for group in rank_groups[part.start : part.stop]
            )
            for rank_groups in ordered_groups
        )
    ideal = sum(map(sum, tokens)) / len(groups)
    return FilledGeneration(lockstep_ratio=seconds / ideal, micro_batches=len(parts) / count)


def simulate_filled(
    lengths: DrawnLengths,
    *,
    ranks: int = 8,
    groups: int = 16,
    rollouts: int = 8,
    trials: int = 20,
) -> FilledGeneration:
    """Return the means over generations of the same lengths as `simulate`'s."""
    drawing_rng = random.Random(0)
    results = []
    for _ in range(trials):
        drawn = [
            [lengths.draw_group(drawing_rng, rollouts) for _ in range(groups)] for _ in range(ranks)
        ]
        results.append(fill_micro_batches(drawn, lengths.longest))
    return FilledGeneration(
        lockstep_ratio=sum(result.lockstep_ratio for result in results) / trials,
        micro_batches=sum(result.micro_batches for result in results) / trials,
    )


def moved_share(subgroups: LengthsByRank) -> float:
    """Return the share of groups that go to another rank."""
    return len(plan_moves([dict(enumerate(rank_tokens)) for rank_tokens in subgroups])) / sum(
        map(len, subgroups)
    )


def lockstep_ratio(order: LengthsByRank) -> float:
    """Return the time in lockstep over the ideal, with a token as the unit of time.

    In lockstep each turn takes as long as the rank with the most tokens. In the ideal all ranks
    have equally many tokens at any time. For [[4, 1], [2, 3]] it is (4 + 3) / (10 / 2) = 1.4.
    """
    return sum(map(max, zip_longest(*order, fillvalue=0))) * len(order) / sum(map(sum, order))


def simulate(
    lengths: DrawnLengths,
    arrange: Callable[[LengthsByRank, random.Random], LengthsByRank],
    *,
    ranks: int = 8,
    groups: int = 16,
    rollouts: int = 8,
    trials: int = 100,
    seed: int = 0,
) -> float:
    """Return the mean ratio of the time in lockstep to the ideal.

    There are `groups` groups on each of `ranks` ranks. All arrangements of one seed get the same
    lengths.
    """
    drawing_rng = random.Random(seed)
    shuffling_rng = random.Random(seed + 1)
    ratios = []
    for _ in range(trials):
        subgroups = [
            [lengths.draw(drawing_rng, rollouts) for _ in range(groups)] for _ in range(ranks)
        ]
        ratios.append(lockstep_ratio(arrange(subgroups, shuffling_rng)))
    return sum(ratios) / trials


def print_table(ranks: int, groups: int, rollouts: int) -> None:
    """Print the simulated ratios of all cases as a Markdown table."""
    counts = {"ranks": ranks, "groups": groups, "rollouts": rollouts}
    print(f"{ranks} ranks, {groups} groups of {rollouts} on each; time in lockstep over the ideal")
    print(
        "| prompt, mean answer, longest | spread of prompts, of rollouts | own shuffles | in order of "
        "length | groups move too | groups that move | micro-batches filled | micro-batches left |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in (*MEASURED_CASES, *DRAWN_CASES):
        ratios = [
            simulate(case, arrange, **counts)
            for arrange in (shuffle_each_rank, order_by_length, move_groups)
        ]
        drawing_rng = random.Random(0)
        subgroups = [
            [case.draw(drawing_rng, rollouts) for _ in range(groups)] for _ in range(ranks)
        ]
        full = simulate_filled(case, **counts)
        cells = [*(f"{ratio:.2f}" for ratio in ratios), f"{moved_share(subgroups):.0%}"]
        cells += [f"{full.lockstep_ratio:.2f}", f"{full.micro_batches:.2f}"]
        lengths = f"{case.prompt:,}, {case.mean:,}, {case.longest:,}"
        print(f"| {lengths} | {case.of_prompts}, {case.of_rollouts} | {' | '.join(cells)} |")


def measure_speed(groups: int, repeats: int) -> None:
    """Time forward and backward passes of the tiny model, each subgroup in rows of 128 tokens.

    All processes draw the same groups and orders from one seed, and each takes those of its own
    rank. A turn lasts as long as on the slowest rank. The fastest of the turns of an order is
    printed, beside what counting tokens says.
    """
    import deepspeed
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from transformers import AutoModelForImageTextToText

    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    plain = AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER, dtype=torch.float32)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    model = deepspeed.initialize(model=plain, optimizer=optimizer, config=settings)[0]
    PartialState()  # which gather_object asks
    rng = random.Random(0)
    case = DrawnLengths(of_prompts=0.7, of_rollouts=0.6, prompt=790, mean=500, longest=2048)
    subgroups = [[case.draw(rng, 8) for _ in range(groups)] for _ in range(ranks)]

    def seconds(order: Sequence[int]) -> float:
        torch.distributed.barrier()
        start = time.perf_counter()
        for tokens in order:
            # Rows of one length, so that seconds grow as tokens do.
            ids = torch.full((tokens // 128, 128), 5, device=model.device)
            model.backward(model(input_ids=ids, labels=ids).loss)
        torch.distributed.barrier()
        return max(gather_object([time.perf_counter() - start]))

    ways = {
        "own shuffles": shuffle_each_rank(subgroups, rng),
        "in order of length": order_by_length(subgroups, rng),
        "as a run": move_groups(subgroups, rng),
    }
    seconds_by_order: dict[str, list[float]] = {name: [] for name in ways}
    seconds(ways["as a run"][rank])  # warm
    for _ in range(repeats):  # by turns, since the machine may have other work
        for name, order in ways.items():
            seconds_by_order[name].append(seconds(order[rank]))
    if rank == 0:
        print(f"{ranks} processes with ZeRO-3, {groups} groups on each; the fastest of {repeats}")
        print("| order | seconds | tokens in lockstep over the ideal |\n|---|---|---|")
        for name, order in ways.items():
            print(f"| {name} | {min(seconds_by_order[name]):.2f} | {lockstep_ratio(order):.2f} |")


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and return its exit code, 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lockstep", description=__doc__)
    parser.add_argument(
        "--measured", action="store_true", help="time passes of the tiny model on these processes"
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="on each rank")
    parser.add_argument("--rollouts", type=int, default=8, help="of a group")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.measured:
        measure_speed(options.groups, options.repeats)
    else:
        print_table(options.ranks, options.groups, options.rollouts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
