"""The doctor's command with one engine for everything: healthy first, then with one correction
after the other taken out. Writes the lines of each to FILE.json. Run by `test_doctor.py`.

Usage: doctor_run.py FILE.json [training arguments]
"""

import hashlib
import json
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from adora_vl import train  # noqa: E402
from adora_vl.doctor import __main__ as command  # noqa: E402
from adora_vl.doctor import engine as doctor_engine  # noqa: E402
from adora_vl.doctor.engine import Examination, check_buffers, examine  # noqa: E402
from adora_vl.rollout import engine as engine_module  # noqa: E402
from adora_vl.rollout import engine_weights  # noqa: E402
from adora_vl.rollout import llm as llm_module  # noqa: E402
from adora_vl.rollout.agreement import SelfCheck  # noqa: E402
from adora_vl.utils.checks import Check, as_json  # noqa: E402
from adora_vl.utils.errors import RolloutError  # noqa: E402


@contextmanager
def expanded(examination: Examination) -> Iterator[None]:
    """Stock TRL: the engine gets expanded image tokens."""
    with patch.object(llm_module, "collapse_image_runs", lambda ids, image_token_id: list(ids)):
        yield


@contextmanager
def unnoticed(examination: Examination) -> Iterator[None]:
    """Take the comparison away, so that nobody notices a difference."""
    with expanded(examination), patch.object(engine_module, "check_prompts", lambda **_: None):
        yield


@contextmanager
def no_sync(examination: Examination) -> Iterator[None]:
    with patch.object(
        engine_weights, "push_weights", lambda llm, tensors, **_: sum(1 for _ in tensors)
    ):
        yield


@contextmanager
def stale_encoder_cache(examination: Examination) -> Iterator[None]:
    with patch.object(engine_weights, "reset_caches", lambda llm: llm.reset_prefix_cache()):
        yield


@contextmanager
def pixel_limits(examination: Examination) -> Iterator[None]:
    """The trainer's processor is changed after the engine was told its limits."""
    image_processor = examination.pair.processor.image_processor
    with patch.object(image_processor, "size", {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}):
        read_again(examination)
        yield
    read_again(examination)


@contextmanager
def unbanned(examination: Examination) -> Iterator[None]:
    generation: Any = examination.pair.engine
    free = {
        key: value for key, value in generation.generation_kwargs.items() if key != "logit_bias"
    }
    with patch.object(generation, "generation_kwargs", free):
        yield


@contextmanager
def doubled_in_the_trainer(examination: Examination) -> Iterator[None]:
    """The processor's ids have twice the image tokens that it makes features for."""
    images = examination.pair.images
    token = examination.pair.processor.image_token_id
    real = images.read

    def doubled(rows: Any) -> Any:
        read = real(rows)
        return replace(
            read,
            ids=[
                [t for token_id in row for t in [token_id] * (2 if token_id == token else 1)]
                for row in read.ids
            ],
        )

    with patch.object(images, "read", doubled):
        read_again(examination)
        yield
    read_again(examination)


@contextmanager
def rounded(examination: Examination) -> Iterator[None]:
    """The policy's rotary frequencies as ZeRO-3 with bfloat16 makes them; the engine's are right."""
    buffers = [b for name, b in examination.pair.policy().named_buffers() if "inv_freq" in name]
    right = [buffer.data for buffer in buffers]
    for buffer in buffers:
        buffer.data = buffer.data.bfloat16()
    yield
    for buffer, data in zip(buffers, right, strict=True):
        buffer.data = data


def read_again(examination: Examination) -> None:
    """Read the rows of the examination's prompts anew."""
    pair = examination.pair
    examination.prompts = pair.read_prompts(pair.first_rows(len(examination.prompts.names)))


STEPS: dict[str, tuple[Any, Callable[[Examination], list[Check]]]] = {
    "expanded": (expanded, lambda e: e.check_agreement()),
    "unnoticed": (unnoticed, lambda e: e.check_agreement()),
    "no_sync": (no_sync, lambda e: [e.after_change(vision=False)]),
    "pixel_limits": (pixel_limits, lambda e: examine(e, 2)),
    "unbanned": (unbanned, lambda e: [e.banned()]),
    "rounded": (
        rounded,
        lambda e: [check_buffers(e.models()), *e.check_agreement(), e.check_distant_agreement()],
    ),
    "doubled": (doubled_in_the_trainer, lambda e: examine(e, 2)[:1]),
    "healthy_again": (
        lambda e: patch.object(e, "max_tokens", 8),
        lambda e: [*e.check_agreement(), e.check_distant_agreement()],
    ),
    "stale_encoder_cache": (
        stale_encoder_cache,
        lambda e: [e.after_change(vision=True)],
    ),  # may break the engine
}


def fingerprint(trainer: Any) -> str:
    """Return all that a run could notice: weights, random states, counters, what is to be logged.

    That the engine has the weights of this step by then saves a sync and changes nothing.
    """
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    generation = trainer.vllm_generation
    facts = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state().tolist(),
        trainer._step,
        str(vars(trainer.state)),
        dict(trainer._metrics["train"]),
        {
            name: list(values)
            for name, values in trainer._logs.items()
            if name in ("prompt", "advantages")
        },
        generation.max_completion_length,
        generation.temperature,
        generation.generation_kwargs,
        trainer.model.training,
    )
    digest.update(pickle.dumps(facts))
    return digest.hexdigest()


def self_check(examination: Examination) -> str:
    """Return the message of the self-check's error, or an empty string where it passes."""
    try:
        SelfCheck(examination.pair).on_train_begin(None, None, None)
    except RolloutError as error:
        return str(error)
    return ""


def main() -> int:
    output = Path(sys.argv[1])
    results: dict[str, Any] = {}
    trainers: list[Any] = []
    build = train.build_trainer

    def build_and_keep(run: Any) -> Any:
        trainers.append(build(run))
        return trainers[-1]

    def examine_all(examination: Examination, merge: int) -> list[Check]:
        (trainer,) = trainers
        before = fingerprint(trainer)
        checks = examine(examination, merge)
        results["examined_unchanged"] = fingerprint(trainer) == before
        refusals = {"healthy": self_check(examination)}
        results["self_check_unchanged"] = fingerprint(trainer) == before
        for name in ("expanded", "pixel_limits", "rounded"):
            with STEPS[name][0](examination):
                refusals[name] = self_check(examination)
        results["refusals"] = refusals
        examination.max_tokens = 12  # enough to show, and half the time
        for name, (sabotage, step) in STEPS.items():
            try:
                with sabotage(examination):
                    results[name] = as_json(step(examination))
            except Exception as error:  # a cache that misses says so itself on a CPU
                results[name] = [{"raised": "".join(traceback.format_exception(error))}]
        output.write_text(json.dumps(results))
        return checks

    with (
        patch.object(doctor_engine, "examine", examine_all),
        patch.object(train, "build_trainer", build_and_keep),
    ):
        return command.main([*sys.argv[2:], "--json", str(output.with_suffix(".table.json"))])


if __name__ == "__main__":
    sys.exit(main())
