"""What the host does for each token and image, in processor seconds: `python -m benchmarks.host`.

While the host does this the card waits. Each row is one piece of work in two ways, ours and the one
that stock TRL with vLLM has, or that a simple program would write; both give equal results, which
is checked. They take turns in one process, and the ratio is of the fastest turns.
"""

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from adora_vl.rewards.completion import (
    REFLECTIVE_WORD_PATTERN,
    REFLECTIVE_WORD_REGEX,
    reflective_words,
)
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from vllm.logprobs import create_sample_logprobs  # noqa: E402
from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402

from adora_vl.models.load import PRETRAINED_FOLDER, load_processor  # noqa: E402
from adora_vl.packing.image_store import (  # noqa: E402
    ImageCache,
    PatchNormalizer,
    effective_settings,
)
from adora_vl.rollout.llm import logps_of_tokens  # noqa: E402

_TURNS_MEASURED = 5
_ANSWER_WORDS = (
    "so",
    "the angle at B",
    "is",
    "twice that of",
    "the arc",
    "and therefore",
    "AC",
    "equals",
)


@dataclass(frozen=True, kw_only=True)
class MeasuredWork:
    """One piece of work of the host, done in two ways."""

    name: str
    unit: str  # what the work is done for, such as `token`
    count: float  # for how many of them
    baseline: Callable[[], Any]
    ours: Callable[[], Any]
    # what the card makes of the result of ours, where it does a part of the work
    on_card: Callable[[Any], Any] = lambda result: result


def process_prompts(tokens: list[int], logps: list[float], flat: bool) -> LogprobsProcessor:
    """Hand the tokens of one rollout to vLLM's front end, one decode step after the other.

    With `flat` it keeps their log-probabilities in lists of numbers, as ours does; otherwise it
    makes an object for each, as vLLM does by default.
    """
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
    counts = {
        word: len(REFLECTIVE_WORD_PATTERN[word].findall(text)) for word in REFLECTIVE_WORD_REGEX
    }
    return {word: count for word, count in counts.items() if count}


def build_works(rollouts: int, length: int) -> list[MeasuredWork]:
    """Return the pieces of work for `rollouts` rollouts of `length` tokens each.

    The second piece is a part of the first: it only reads log-probabilities that are there already.
    The answers have three entries of `_ANSWER_WORDS` for four tokens, and about half of them end
    with a reflective word.
    """
    draw = random.Random(0)
    tokens = [draw.randrange(150_000) for _ in range(length)]
    logps = [-draw.random() for _ in range(length)]
    # A few are enough here: objects that live on make every later garbage collection slower.
    few = min(rollouts, 8)
    objects = [process_prompts(tokens, logps, flat=False).logprobs for _ in range(few)]
    numbers = [process_prompts(tokens, logps, flat=True).logprobs for _ in range(few)]

    def rollouts_logps(flat: bool) -> list[list[float]]:
        """Return the log-probabilities of a generation, which are collected and then read.

        The engine returns its answers together, so those of all rollouts are in memory until then.
        """
        answers = [process_prompts(tokens, logps, flat=flat).logprobs for _ in range(rollouts)]
        return [logps_of_tokens(answer, tokens) for answer in answers]

    texts = [
        " ".join(draw.choices(_ANSWER_WORDS, k=length * 3 // 4))
        + draw.choice(["", " wait, I check"])
        for _ in range(rollouts)
    ]
    of_tokens = partial(MeasuredWork, unit="token", count=rollouts * length)
    return [
        of_tokens(
            name="vLLM's log-probabilities of each decode step",
            baseline=partial(rollouts_logps, flat=False),
            ours=partial(rollouts_logps, flat=True),
        ),
        MeasuredWork(
            name="of which reading those of the sampled tokens",
            unit="token",
            count=few * length,
            baseline=lambda: [logps_of_tokens(candidates, tokens) for candidates in objects],
            ours=lambda: [logps_of_tokens(flat, tokens) for flat in numbers],
        ),
        of_tokens(
            name="reflective words of the answers",
            baseline=lambda: [simple_words(text) for text in texts],
            ours=lambda: [reflective_words(text) for text in texts],
        ),
        of_tokens(
            name="a column of the batch",
            baseline=lambda: [torch.tensor(tokens).tolist() for _ in range(rollouts)],
            ours=lambda: [torch.from_numpy(np.array(tokens)).tolist() for _ in range(rollouts)],
        ),
    ]


def work_of_images(side: int = 1036) -> MeasuredWork:
    """Return the work for a megapixel image, from the cache to the policy's vision tower.

    The baseline makes all of its numbers on the host, as Transformers does. Ours copies the bytes,
    and the card makes the numbers of them.
    """
    processor: Any = load_processor(str(PRETRAINED_FOLDER)).image_processor
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    settings = effective_settings(processor, {"max_pixels": side * side})
    settings["size"] = {"shortest_edge": side * side, "longest_edge": side * side}
    image = ImageCache(2**30).get(processor, Image.fromarray(pixels), settings)
    both_frames = PatchNormalizer(
        processor, {**settings, "do_rescale": False, "do_normalize": False}
    )
    patches_RD = both_frames(image.frames_RF)
    shape = (len(patches_RD), -1, settings["temporal_patch_size"], *[settings["patch_size"]] * 2)

    def numbers() -> torch.Tensor:
        """Rescale and normalise both frames of all patches."""
        normalized: torch.Tensor = processor.rescale_and_normalize(
            patches_RD.view(shape).transpose(1, 2),
            settings["do_rescale"],
            settings["rescale_factor"],
            settings["do_normalize"],
            settings["image_mean"],
            settings["image_std"],
        )
        return normalized.transpose(1, 2).reshape(len(patches_RD), -1)

    return MeasuredWork(
        name="an image's numbers",
        unit="1,000 pixels",
        count=side * side / 1000,
        baseline=numbers,
        ours=image.frames_RF.clone,  # into pinned memory
        on_card=PatchNormalizer(processor, settings),
    )


def fastest_seconds(work: MeasuredWork) -> tuple[float, float]:
    """Processor seconds of the baseline and of ours, each the fastest of its turns."""
    seconds: dict[str, list[float]] = {"baseline": [], "ours": []}
    for turn in range(_TURNS_MEASURED):
        results = {}
        order = ("baseline", "ours") if turn % 2 else ("ours", "baseline")
        for name in order:
            gc.collect()
            began = time.process_time()
            results[name] = getattr(work, name)()
            seconds[name].append(time.process_time() - began)
        if not _are_equal(results["baseline"], work.on_card(results["ours"])):
            sys.exit(f"error: {work.name}: the two ways differ")
    return min(seconds["baseline"]), min(seconds["ours"])


def _are_equal(first: object, second: object) -> bool:
    """Return whether two results are equal, to the bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=64, help="of a generation (default 64)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each (default 2,048)")
    options = parser.parse_args()
    rows = []
    all_works = [*build_works(options.rollouts, options.length), work_of_images()]
    for work in tqdm(all_works, desc="Works", leave=False):
        baseline, ours = fastest_seconds(work)
        microseconds = 1e6 / work.count
        rows.append(
            [
                work.name,
                work.unit,
                f"{baseline * microseconds:.3f}",
                f"{ours * microseconds:.3f}",
                f"{ours / baseline:.2f}",
            ]
        )
    print("| work | for each | baseline, µs | ours, µs | ratio |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
