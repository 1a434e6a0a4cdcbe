"""Times rollouts of a real engine, requested in stock TRL's way and in ours.

`python -m benchmarks.rollouts`.

The ways differ in one thing each, come by turns in one engine, and sample as many tokens: 32
requests or one request per prompt, with a seed for each rollout or none, with the text of the
answer or its token ids alone. The caches are emptied before each call, as they are after each
weight sync. Medians of the processor's seconds.
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from typing import Any

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

from PIL import Image  # noqa: E402
from transformers import AutoProcessor  # noqa: E402

from adora_vl.data.prompts import conversation  # noqa: E402
from adora_vl.models.load import PRETRAINED_FOLDER  # noqa: E402
from adora_vl.rollout.engine_settings import machine_options  # noqa: E402
from adora_vl.rollout.prompt_tokens import never_sampled_ids  # noqa: E402
from adora_vl.rollout.weight_sync import reset_caches  # noqa: E402
from adora_vl.synthetic.generate import generate  # noqa: E402

# By name, whether there is one request per prompt, a seed for each rollout, and its text.
SETTINGS_BY_WAY = {
    "as stock TRL": (False, False, True),
    "token ids alone": (False, False, False),
    "and seeds": (False, True, False),
    "and one request per prompt": (True, True, False),
    "one request, no seeds": (True, False, False),
}


def build_prompts(
    side: int, problems: int, generations: int
) -> tuple[list[tuple[list[int], list[Any]]], int]:
    """Return the ids and images of each rollout, and the id of the image token.

    The rollouts of a group have the same image.
    """
    processor: Any = AutoProcessor.from_pretrained(PRETRAINED_FOLDER)
    rows = []
    for row in generate(problems, seed=5):
        image = row["images"][0].resize((side, side), Image.Resampling.BICUBIC)
        messages = conversation(row["problem"])
        content = [{"type": "image"}, {"type": "text", "text": messages[-1]["content"]}]
        text = processor.apply_chat_template(
            [*messages[:-1], {"role": "user", "content": content}], tokenize=False
        )
        rows += [(processor.tokenizer(text)["input_ids"], [image])] * generations
    return rows, processor.image_token_id


def main() -> None:
    """Time all ways by turns, and print their medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("side", 448),
        ("problems", 4),
        ("generations", 8),
        ("tokens", 40),
        ("turns", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--compile", action="store_true", help="with torch.compile, as vLLM does by itself"
    )
    parser.add_argument(
        "--profile", choices=list(SETTINGS_BY_WAY), help="also print where this way spends its time"
    )
    options = parser.parse_args()
    from adora_vl.rollout.llm import PolicyLLM
    from adora_vl.rollout.rollouts import SamplingRequest

    longest = 512 + options.tokens
    start = time.process_time()
    llm: Any = PolicyLLM(
        model=str(PRETRAINED_FOLDER),
        dtype="float32",
        max_model_len=longest,
        gpu_memory_utilization=0.25,
        seed=0,
        max_num_seqs=options.problems * options.generations,
        logprobs_mode="raw_logprobs",
        limit_mm_per_prompt={"video": 0},
        mm_processor_kwargs={"min_pixels": 784, "max_pixels": options.side**2},
        **machine_options(longest, 4096, not options.compile),
    )
    print(f"the engine's start: {time.process_time() - start:.1f} s")
    rows, image_token = build_prompts(options.side, options.problems, options.generations)
    groups = [row // options.generations for row in range(len(rows))]
    banned = dict.fromkeys(never_sampled_ids(llm.get_tokenizer()), -100.0)
    seconds_by_way: dict[str, list[float]] = {way: [] for way in SETTINGS_BY_WAY}
    profile = cProfile.Profile()
    for turn in range(options.turns + 1):
        for way, (is_grouped, has_seeds, has_text) in SETTINGS_BY_WAY.items():
            parameters = {
                "temperature": 1.0,
                "ignore_eos": True,
                "logprobs": 0,
                "logit_bias": banned,
                "detokenize": has_text,
            }
            seeds = [
                turn + 1000 * group + position % options.generations
                for position, group in enumerate(groups)
            ]
            requests = [
                SamplingRequest(
                    prompt_ids=ids,
                    images=images,
                    group=group if is_grouped else row,
                    seed=seed if has_seeds else None,
                    max_tokens=options.tokens,
                )
                for row, ((ids, images), group, seed) in enumerate(
                    zip(rows, groups, seeds, strict=True)
                )
            ]
            reset_caches(llm)
            if turn and way == options.profile:
                profile.enable()
            start = time.process_time()
            answers = llm.sample(requests, parameters, image_token)
            if turn:  # the first of each warms up
                seconds_by_way[way].append(time.process_time() - start)
            profile.disable()
            assert [len(answer.tokens) for answer in answers] == [options.tokens] * len(rows)
    stock = statistics.median(seconds_by_way["as stock TRL"])
    for way, seconds in seconds_by_way.items():
        median = statistics.median(seconds)
        print(
            f"{way:<28}{median:>8.3f} s {median / stock:>6.2f}   "
            f"{' '.join(f'{second:.2f}' for second in seconds)}"
        )
    if options.profile:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
