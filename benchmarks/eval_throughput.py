"""How much quicker `infer` is than a plain Transformers loop: `python benchmarks/eval_throughput.py --rows 256`.

The same problems, greedy, with the same token limit, in one run: first `infer` with its engine (start-up not counted),
then one call of `generate` per problem, as a script of twenty lines would do it. Prints both rates and their ratio, and
how many answers are the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from adora_vl.models.tiny.build import PRETRAINED
from adora_vl.prompts import SYSTEM_PROMPT, conversation_with_images
from data_prep.storage import load_split, write_split
from data_prep.synthetic.generate import generate
from eval.engines import AnswerEngineSettings, build_engine, default_engine
from eval.geometry3k.benchmark import problems
from eval.predictions import PREDICTIONS, read_predictions
from eval.runner import Problem, infer

Figures = dict[str, Any]


def by_infer(asked: list[Problem], settings: AnswerEngineSettings, folder: Path) -> Figures:
    """Seconds, tokens and answers of `infer`, the durable writing of each batch included."""
    summary = infer(asked, folder, settings, {}, system_prompt=SYSTEM_PROMPT, build=build_engine)
    rows = read_predictions(folder / PREDICTIONS)
    return {
        "seconds": summary.seconds,
        "tokens": sum(row["n_tokens"] for row in rows),
        "answers": [row["response"] for row in rows],
    }


def by_loop(asked: list[Problem], settings: AnswerEngineSettings) -> Figures:
    """The same with one call of `generate` per problem."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor: Any = AutoProcessor.from_pretrained(settings.model)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(settings.model, dtype="auto")
    model = loaded.to(device).eval()
    model.generation_config.repetition_penalty = None  # greedy means greedy
    answers, tokens = [], 0
    start = time.perf_counter()
    for problem in asked:
        images = problem.images()
        messages = conversation_with_images(problem.prompt, len(images), SYSTEM_PROMPT)
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[text], images=images, return_tensors="pt").to(device)
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=settings.max_tokens, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        tokens += len(new)
        answers.append(processor.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return {"seconds": time.perf_counter() - start, "tokens": tokens, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PRETRAINED), help="default: the shipped tiny model")
    parser.add_argument("--data", type=Path, help="a prepared dataset; default: synthetic problems")
    parser.add_argument("--split", default="test")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--engine", default=default_engine(), choices=("vllm", "transformers"))
    options = parser.parse_args()
    settings = AnswerEngineSettings(options.model, options.engine, max_tokens=options.max_tokens)
    with tempfile.TemporaryDirectory() as scratch:
        data = options.data or Path(scratch) / "data"
        if options.data is None:
            write_split(generate(options.rows, split="test", seed=0), data, "test")
        asked = problems(load_split(data, options.split))[: options.rows]
        engine = by_infer(asked, settings, Path(scratch) / "out")
    loop = by_loop(asked, settings)
    for name, figures in ((f"infer, {options.engine}", engine), ("plain loop", loop)):
        rates = (
            f"{len(asked) / figures['seconds']:8.1f} answers/s {figures['tokens'] / figures['seconds']:9.0f} tokens/s"
        )
        print(f"{name:<22}{figures['seconds']:8.1f} s {rates}")
    same = sum(one == other for one, other in zip(engine["answers"], loop["answers"], strict=True))
    print(f"ratio of answers/s: {loop['seconds'] / engine['seconds']:.1f}; {same} of {len(asked)} answers are the same")


if __name__ == "__main__":
    main()
