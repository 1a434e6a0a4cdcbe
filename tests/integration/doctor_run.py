"""Runs the doctor's command with one engine: healthy first, then with each correction taken out.

A sabotage takes one of our corrections of TRL or vLLM out. The checks of each are written to
FILE.json. Run by `test_doctor.py`.

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
from adora_vl.doctor.engine import EngineChecker, check_buffers, run_engine_checks  # noqa: E402
from adora_vl.rollout import engine as engine_module  # noqa: E402
from adora_vl.rollout import engine_weights  # noqa: E402
from adora_vl.rollout import llm as llm_module  # noqa: E402
from adora_vl.rollout.agreement import SelfCheck  # noqa: E402
from adora_vl.utils.checks import Check, as_json  # noqa: E402
from adora_vl.utils.errors import RolloutError  # noqa: E402


@contextmanager
def send_expanded_image_tokens(checker: EngineChecker) -> Iterator[None]:
    """Give the engine expanded image tokens, as stock TRL does, which it expands again."""
    with patch.object(llm_module, "collapse_image_runs", lambda ids, image_token_id: list(ids)):
        yield


@contextmanager
def send_expanded_tokens_unchecked(checker: EngineChecker) -> Iterator[None]:
    """Give the engine expanded image tokens, and take the comparison of prompts away."""
    with (
        send_expanded_image_tokens(checker),
        patch.object(engine_module, "check_prompts", lambda **_: None),
    ):
        yield


@contextmanager
def skip_weight_sync(checker: EngineChecker) -> Iterator[None]:
    """Let a weight sync read all tensors and give the engine none."""
    with patch.object(
        engine_weights, "push_weights", lambda llm, tensors, **_: sum(1 for _ in tensors)
    ):
        yield


@contextmanager
def keep_encoder_cache(checker: EngineChecker) -> Iterator[None]:
    """Reset the prefix cache alone after a sync; the engine keeps features of old weights."""
    with patch.object(engine_weights, "reset_caches", lambda llm: llm.reset_prefix_cache()):
        yield


@contextmanager
def change_pixel_limits(checker: EngineChecker) -> Iterator[None]:
    """Change the pixel limits of the trainer's processor after the engine got its own."""
    image_processor = checker.engine_and_policy.processor.image_processor
    with patch.object(image_processor, "size", {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}):
        read_prompts_again(checker)
        yield
    read_prompts_again(checker)


@contextmanager
def allow_banned_tokens(checker: EngineChecker) -> Iterator[None]:
    """Remove the bias that keeps the engine from sampling image tokens."""
    engine: Any = checker.engine_and_policy.engine
    without_bias = {
        key: value for key, value in engine.generation_kwargs.items() if key != "logit_bias"
    }
    with patch.object(engine, "generation_kwargs", without_bias):
        yield


@contextmanager
def double_image_tokens_in_trainer(checker: EngineChecker) -> Iterator[None]:
    """Give the processor's ids twice the image tokens that it makes features for."""
    images = checker.engine_and_policy.images
    image_token_id = checker.engine_and_policy.processor.image_token_id
    read_once = images.read

    def read_with_doubled_tokens(rows: Any) -> Any:
        prompts = read_once(rows)
        doubled_ids: list[list[int]] = []
        for ids in prompts.ids:
            doubled_ids.append([])
            for token_id in ids:
                copies = 2 if token_id == image_token_id else 1
                doubled_ids[-1] += [token_id] * copies
        return replace(prompts, ids=doubled_ids)

    with patch.object(images, "read", read_with_doubled_tokens):
        read_prompts_again(checker)
        yield
    read_prompts_again(checker)


@contextmanager
def round_rotary_frequencies(checker: EngineChecker) -> Iterator[None]:
    """Round the policy's rotary frequencies as ZeRO-3 in bfloat16 does; the engine's are right."""
    buffers = [
        buffer
        for name, buffer in checker.engine_and_policy.policy.named_buffers()
        if "inv_freq" in name
    ]
    exact_frequencies = [buffer.data for buffer in buffers]
    for buffer in buffers:
        buffer.data = buffer.data.bfloat16()
    yield
    for buffer, data in zip(buffers, exact_frequencies, strict=True):
        buffer.data = data


def read_prompts_again(checker: EngineChecker) -> None:
    """Read the rows of the checker's prompts anew."""
    pair = checker.engine_and_policy
    checker.prompts = pair.read_prompts(pair.first_rows(len(checker.prompts.row_names)))


SABOTAGE_AND_CHECKS_BY_NAME: dict[str, tuple[Any, Callable[[EngineChecker], list[Check]]]] = {
    "expanded": (send_expanded_image_tokens, lambda e: e.check_agreement()),
    "unnoticed": (send_expanded_tokens_unchecked, lambda e: e.check_agreement()),
    "no_sync": (skip_weight_sync, lambda e: [e.check_after_change(vision=False)]),
    "pixel_limits": (change_pixel_limits, lambda e: run_engine_checks(e, 2)),
    "unbanned": (allow_banned_tokens, lambda e: [e.check_banned_tokens()]),
    "rounded": (
        round_rotary_frequencies,
        lambda e: [check_buffers(e.models), *e.check_agreement(), e.check_distant_agreement()],
    ),
    "doubled": (double_image_tokens_in_trainer, lambda e: run_engine_checks(e, 2)[:1]),
    "healthy_again": (
        lambda e: patch.object(e, "max_tokens", 8),
        lambda e: [*e.check_agreement(), e.check_distant_agreement()],
    ),
    "stale_encoder_cache": (
        keep_encoder_cache,
        lambda e: [e.check_after_change(vision=True)],
    ),  # may break the engine
}


def hash_trainer_state(trainer: Any) -> str:
    """Hash all that a run could notice: weights, random states, counters, what is to be logged.

    The engine's weights are left out. A checker gives it those of this step, which the run
    would have done next; so the run saves a sync, and samples the same.
    """
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    generation = trainer.vllm_generation
    noticeable = (
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
    digest.update(pickle.dumps(noticeable))
    return digest.hexdigest()


def self_check_error(checker: EngineChecker) -> str:
    """Return the message of the self-check's error, or an empty string where it passes."""
    try:
        SelfCheck(checker.engine_and_policy).on_train_begin(None, None, None)
    except RolloutError as error:
        return str(error)
    return ""


def main() -> int:
    """Build a trainer, let the doctor check it with each sabotage, and write what it says.

    The doctor's own command runs. Two of its functions are replaced: one keeps the trainer that is
    built, and the other checks it first as the doctor does, then once with each sabotage.
    """
    output = Path(sys.argv[1])
    results: dict[str, Any] = {}
    trainers: list[Any] = []
    build = train.build_trainer

    def build_and_keep(run: Any) -> Any:
        trainers.append(build(run))
        return trainers[-1]

    def run_all_checks(checker: EngineChecker, merge: int) -> list[Check]:
        (trainer,) = trainers
        hash_before = hash_trainer_state(trainer)
        checks = run_engine_checks(checker, merge)
        results["checks_change_nothing"] = hash_trainer_state(trainer) == hash_before
        refusals = {"healthy": self_check_error(checker)}
        results["self_check_unchanged"] = hash_trainer_state(trainer) == hash_before
        for name in ("expanded", "pixel_limits", "rounded"):
            with SABOTAGE_AND_CHECKS_BY_NAME[name][0](checker):
                refusals[name] = self_check_error(checker)
        results["refusals"] = refusals
        checker.max_tokens = 12  # enough to show, and half the time
        for name, (sabotage, run_checks) in SABOTAGE_AND_CHECKS_BY_NAME.items():
            try:
                with sabotage(checker):
                    results[name] = as_json(run_checks(checker))
            except Exception as error:  # a cache that misses says so itself on a CPU
                results[name] = [{"raised": "".join(traceback.format_exception(error))}]
        output.write_text(json.dumps(results))
        return checks

    with (
        patch.object(doctor_engine, "run_engine_checks", run_all_checks),
        patch.object(train, "build_trainer", build_and_keep),
    ):
        return command.main([*sys.argv[2:], "--json", str(output.with_suffix(".table.json"))])


if __name__ == "__main__":
    sys.exit(main())
