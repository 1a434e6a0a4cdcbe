"""Times rollouts of a real engine, requested in stock TRL's way and in ours.

    python -m benchmarks.rollouts

The ways come by turns in one engine, and sample equally many tokens. Each differs from another one
in one thing: one request per rollout or per prompt, a seed for each rollout or none, the text of
the answer or its token ids alone. The caches are emptied before each call, as they are after each
weight sync. It prints medians of the processor's seconds.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

from PIL import Image  # noqa: E402
from transformers import AutoProcessor, ProcessorMixin  # noqa: E402

from adora_vl.data.prompts import conversation  # noqa: E402
from adora_vl.models.load import PRETRAINED_FOLDER  # noqa: E402
from adora_vl.rollout.engine_settings import machine_options  # noqa: E402
from adora_vl.rollout.prompt_tokens import never_sampled_ids  # noqa: E402
from adora_vl.rollout.rollouts import SamplingRequest  # noqa: E402
from adora_vl.rollout.weight_sync import reset_caches  # noqa: E402
from adora_vl.synthetic.generate import generate  # noqa: E402

if TYPE_CHECKING:
    from adora_vl.rollout.llm import PolicyLLM


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the engine is asked for rollouts."""

    is_grouped: bool  # one request per prompt, in place of one per rollout
    has_seeds: bool  # a seed for each rollout
    has_text: bool  # the text of each answer, beside its token ids


AS_STOCK_TRL = "as stock TRL"
WAYS = {
    AS_STOCK_TRL: Way(is_grouped=False, has_seeds=False, has_text=True),
    "token ids alone": Way(is_grouped=False, has_seeds=False, has_text=False),
    "and seeds": Way(is_grouped=False, has_seeds=True, has_text=False),
    "and one request per prompt": Way(is_grouped=True, has_seeds=True, has_text=False),
    "one request, no seeds": Way(is_grouped=True, has_seeds=False, has_text=False),
}


class Prompt(NamedTuple):
    """The prompt of a rollout."""

    token_ids: list[int]
    images: list[Image.Image]
    group: int


def build_prompts(processor: ProcessorMixin, options: argparse.Namespace) -> list[Prompt]:
    """Return the prompt of each rollout. The rollouts of a group have the same image."""
    side = options.side
    prompts = []
    for group, row in enumerate(generate(options.problems, seed=5)):
        image = row["images"][0].resize((side, side), Image.Resampling.BICUBIC)
        messages = conversation(row["problem"])
        content = [{"type": "image"}, {"type": "text", "text": messages[-1]["content"]}]
        text = processor.apply_chat_template(
            [*messages[:-1], {"role": "user", "content": content}], tokenize=False
        )
        token_ids = processor.tokenizer(text)["input_ids"]
        prompts += [Prompt(token_ids, [image], group)] * options.generations
    return prompts


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, help_text in (
        ("side", 448, "pixels of an image's side"),
        ("problems", 4, "groups of rollouts"),
        ("generations", 8, "rollouts of a group"),
        ("tokens", 40, "of a rollout"),
        ("turns", 5, "that are counted"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=help_text)
    parser.add_argument(
        "--compile", action="store_true", help="with torch.compile, as vLLM does by itself"
    )
    parser.add_argument(
        "--profile", choices=list(WAYS), help="also print where this way spends its time"
    )
    return parser.parse_args()


def start_engine(options: argparse.Namespace) -> "PolicyLLM":
    """Start an engine of the tiny model, and print what that takes."""
    # It imports vLLM, for which `--help` need not wait.
    from adora_vl.rollout.llm import PolicyLLM

    max_length = 512 + options.tokens
    start = time.process_time()
    llm = PolicyLLM(
        model=str(PRETRAINED_FOLDER),
        dtype="float32",
        max_model_len=max_length,
        gpu_memory_utilization=0.25,
        seed=0,
        max_num_seqs=options.problems * options.generations,
        logprobs_mode="raw_logprobs",
        limit_mm_per_prompt={"video": 0},
        mm_processor_kwargs={"min_pixels": 784, "max_pixels": options.side**2},
        **machine_options(max_length, 4096, not options.compile),
    )
    print(f"the engine's start: {time.process_time() - start:.1f} s")
    return llm


def build_requests(
    prompts: Sequence[Prompt], way: Way, turn: int, max_tokens: int
) -> list[SamplingRequest]:
    """Return a request for each rollout; the engine joins those of one `group` into one.

    A seed follows from the turn, the group and the number of the rollout in its group.
    """
    requests = []
    count_by_group: Counter[int] = Counter()
    for number, prompt in enumerate(prompts):
        seed = turn + 1000 * prompt.group + count_by_group[prompt.group]
        count_by_group[prompt.group] += 1
        requests.append(
            SamplingRequest(
                prompt_ids=prompt.token_ids,
                images=prompt.images,
                merge_key=prompt.group if way.is_grouped else number,
                seed=seed if way.has_seeds else None,
                max_tokens=max_tokens,
            )
        )
    return requests


def main() -> None:
    """Time all ways by turns, and print their medians."""
    options = parse()
    llm = start_engine(options)
    processor: Any = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    prompts = build_prompts(processor, options)
    banned_tokens = dict.fromkeys(never_sampled_ids(llm.get_tokenizer()), -100.0)
    seconds_by_way: dict[str, list[float]] = {name: [] for name in WAYS}
    profile = cProfile.Profile()
    for turn in range(options.turns + 1):
        for name, way in WAYS.items():
            settings = {
                "temperature": 1.0,
                "ignore_eos": True,
                "logprobs": 0,
                "logit_bias": banned_tokens,
                "detokenize": way.has_text,
            }
            requests = build_requests(prompts, way, turn, options.tokens)
            reset_caches(llm)
            is_counted = turn > 0  # the first turn warms up
            if is_counted and name == options.profile:
                profile.enable()
            start = time.process_time()
            results = llm.sample(requests, settings, processor.image_token_id)
            seconds = time.process_time() - start
            profile.disable()
            if is_counted:
                seconds_by_way[name].append(seconds)
            assert all(len(result.tokens) == options.tokens for result in results)
            assert len(results) == len(prompts)
    print_medians(seconds_by_way)
    if options.profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)


def print_medians(seconds_by_way: dict[str, list[float]]) -> None:
    """Print each way's median seconds, their ratio to stock TRL's, and the seconds of each turn."""
    stock_median = statistics.median(seconds_by_way[AS_STOCK_TRL])
    for name, seconds in seconds_by_way.items():
        median = statistics.median(seconds)
        turns = " ".join(f"{second:.2f}" for second in seconds)
        print(f"{name:<28}{median:>8.3f} s {median / stock_median:>6.2f}   {turns}")


if __name__ == "__main__":
    main()
