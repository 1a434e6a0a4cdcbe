"""Tools and environments where the policy samples itself, with Transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer, load_problems
from data_prep.__main__ import main as data_prep

GROUP_SIZE = 4


class SampledTurn(NamedTuple):
    """A turn as `generate` has sampled it."""

    prompt: list[int]
    tokens: list[int]  # padded at the end
    logps_C: Tensor


class GenerationRecorder:
    """Stands in for a model's `generate`, and records the log-probability of each sampled token."""

    def __init__(self, generate: Callable[..., Any]) -> None:
        self._generate = generate
        self.turns_of_calls: list[list[SampledTurn]] = []

    def __call__(self, **inputs) -> Tensor:
        output = self._generate(**inputs, return_dict_in_generate=True, output_logits=True)
        prompts_BP = inputs["input_ids"]
        sampled_BC = output.sequences[:, prompts_BP.size(1) :]
        logps_BCV = torch.stack(output.logits, dim=1).log_softmax(dim=-1)
        logps_BC = logps_BCV.gather(2, sampled_BC[..., None])[..., 0]
        turns = []
        for prompt_P, mask_P, sampled_C, logps_C in zip(
            prompts_BP, inputs["attention_mask"], sampled_BC, logps_BC, strict=True
        ):
            prompt = prompt_P.masked_select(mask_P.bool()).tolist()
            turns.append(SampledTurn(prompt, sampled_C.tolist(), logps_C))
        self.turns_of_calls.append(turns)
        return output.sequences


def turns_of_policy(mask: list[int]) -> list[tuple[int, int]]:
    """Return the begin and end of each run of ones: 1 1 0 1 has (0, 2) and (3, 4)."""
    turns = []
    begin = None
    for position, is_sampled in enumerate([*mask, 0]):
        if is_sampled and begin is None:
            begin = position
        if not is_sampled and begin is not None:
            turns.append((begin, position))
            begin = None
    return turns


@pytest.fixture(scope="module")
def corners_folder(tmp_path_factory) -> Path:
    """Return a prepared folder of problems whose numbers cannot be read without the tool `zoom`."""
    folder = tmp_path_factory.mktemp("data") / "corners"
    arguments = ["synthetic", "--families", "corners", "--size", "448", "--rows", "16"]
    assert data_prep([*arguments, "--test-rows", "4", "--output", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_each_turn_is_sampled_from_the_tokens_and_pictures_that_the_policy_learns_from(
    corners_folder, tmp_path
):
    """The pass of the loss finds the log-probabilities with which every token was sampled.

    So the second turn was sampled with the picture that the tool has returned. Only the rollouts
    whose call was answered sample it, together.
    """
    args = AdoraGRPOConfig(
        str(tmp_path / "run"),
        tools=["zoom"],
        max_tool_calling_iterations=2,
        use_cpu=True,
        bf16=False,
        min_pixels=3136,
        max_pixels=3136,
        max_steps=1,
        per_device_train_batch_size=4 * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=200,
        report_to="none",
        save_strategy="no",
    )
    problems = load_problems(
        corners_folder, adora_system_prompt="Look with zoom.", adora_prompt="{problem}"
    )
    trainer = AdoraGRPOTrainer("tiny_zoom", "accuracy", args, problems)
    recorder = GenerationRecorder(trainer.model.generate)
    trainer.model.generate = recorder
    # The trainer's rows describe the tools in their system prompt.
    rows = [trainer.train_dataset[row // GROUP_SIZE] for row in range(16)]
    batch = trainer._sample_for_evaluation(rows)
    policy_logps_BC = trainer._policy_logps(batch)

    # The rollouts that go on are sampled together, in the order of their rows.
    turns_of_calls = [iter(turns) for turns in recorder.turns_of_calls]
    for row in range(16):
        in_prompt = batch["prompt_mask"][row].bool()
        prompt = batch["prompt_ids"][row][in_prompt].tolist()
        in_completion = batch["completion_mask"][row].bool()
        completion = batch["completion_ids"][row][in_completion].tolist()
        turns = turns_of_policy(batch["tool_mask"][row][in_completion].tolist())
        for number, (begin, end) in enumerate(turns):
            sampled = next(turns_of_calls[number])
            assert sampled.prompt == [*prompt, *completion[:begin]]
            assert sampled.tokens[: end - begin] == completion[begin:end]
            # Two passes in float32 differ by some 1e-6, and with another picture by 1e-3 or more.
            policy_logps_C = policy_logps_BC[row, begin:end]
            assert torch.allclose(sampled.logps_C[: end - begin], policy_logps_C, atol=1e-4)
    assert all(next(turns, None) is None for turns in turns_of_calls)
    count_by_turn = [len(turns) for turns in recorder.turns_of_calls]
    assert count_by_turn[0] == 16
    assert 0 < count_by_turn[1] < 16, "some rollouts call, and some do not"
