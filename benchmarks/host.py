"""What the host does for each sampled token, in processor seconds: `python -m benchmarks.host`.

While the host does this the card waits. Each row is one piece of work in two ways, ours and the one
that stock TRL with vLLM has, or that a simple program would write; both give equal results, which is
checked. They take turns in one process, and the ratio is of the fastest turns.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from adora_vl.rewards.completion import _PATTERNS, REFLECTIVE, reflective_words
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import numpy as np  # noqa: E402
from vllm.logprobs import create_sample_logprobs  # noqa: E402
from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402

from adora_vl.rollout.llm import logps_of_tokens  # noqa: E402

_TURNS = 5
_WORDS = ("so", "the angle at B", "is", "twice that of", "the arc", "and therefore", "AC", "equals")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One piece of work of the host, done in two ways."""

    name: str
    baseline: Callable[[], Any]
    ours: Callable[[], Any]


def processed(tokens: list[int], logps: list[float], flat: bool) -> LogprobsProcessor:
    """Hand the tokens of one rollout to vLLM's front end, one decode step after the other."""
    processor = LogprobsProcessor(
        tokenizer=None,
        logprobs=create_sample_logprobs(flat),
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=0,
        num_prompt_logprobs=None,
    )
    token_ids = np.array(tokens)[:, None, None]
    values = np.array(logps)[:, None, None]
    ranks = np.ones((len(tokens), 1), dtype=np.int64)
    for step in range(len(tokens)):
        lists = LogprobsLists(token_ids[step], values[step], ranks[step], None)
        processor._update_sample_logprobs(lists)
    return processor


def simple_words(text: str) -> dict[str, int]:
    """Count reflective words with every pattern on every text."""
    counts = {word: len(_PATTERNS[word].findall(text)) for word in REFLECTIVE}
    return {word: count for word, count in counts.items() if count}


def works(rollouts: int, length: int) -> list[Work]:
    """The pieces of work for so many rollouts of so many tokens."""
    draw = random.Random(0)
    tokens = [draw.randrange(150_000) for _ in range(length)]
    logps = [-draw.random() for _ in range(length)]
    objects = [processed(tokens, logps, flat=False).logprobs for _ in range(rollouts)]
    numbers = [processed(tokens, logps, flat=True).logprobs for _ in range(rollouts)]
    texts = [
        " ".join(draw.choices(_WORDS, k=length * 3 // 4)) + draw.choice(["", " wait, I check"])
        for _ in range(rollouts)
    ]
    return [
        Work(
            name="vLLM's log-probabilities of each decode step",
            baseline=lambda: [
                logps_of_tokens(processed(tokens, logps, flat=False).logprobs, tokens)
                for _ in range(rollouts)
            ],
            ours=lambda: [
                logps_of_tokens(processed(tokens, logps, flat=True).logprobs, tokens)
                for _ in range(rollouts)
            ],
        ),
        Work(
            name="of which reading those of the sampled tokens",
            baseline=lambda: [logps_of_tokens(candidates, tokens) for candidates in objects],
            ours=lambda: [logps_of_tokens(flat, tokens) for flat in numbers],
        ),
        Work(
            name="reflective words of the answers",
            baseline=lambda: [simple_words(text) for text in texts],
            ours=lambda: [reflective_words(text) for text in texts],
        ),
    ]


def fastest_seconds(work: Work) -> tuple[float, float]:
    """Processor seconds of the baseline and of ours, each the fastest of its turns."""
    seconds: dict[str, list[float]] = {"baseline": [], "ours": []}
    for turn in range(_TURNS):
        results = {}
        order = ("baseline", "ours") if turn % 2 else ("ours", "baseline")
        for name in order:
            gc.collect()
            began = time.process_time()
            results[name] = getattr(work, name)()
            seconds[name].append(time.process_time() - began)
        if results["baseline"] != results["ours"]:
            sys.exit(f"error: {work.name}: the two ways differ")
    return min(seconds["baseline"]), min(seconds["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64, help="of a generation (default 64)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each (default 2,048)")
    options = parser.parse_args()
    rows = []
    for work in tqdm(works(options.rollouts, options.length), desc="Works", leave=False):
        baseline, ours = fastest_seconds(work)
        per_token = 1e6 / (options.rollouts * options.length)
        rows.append(
            [
                work.name,
                f"{baseline * per_token:.2f}",
                f"{ours * per_token:.2f}",
                f"{ours / baseline:.2f}",
            ]
        )
    print("| work | baseline, µs a token | ours | ratio |\n|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
