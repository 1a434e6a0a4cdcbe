"""What the parity runs share: keys, data, a recorder of gradients, and inspections of a trainer.

An inspection looks at a trainer that has an engine: the doctor's table, the answers of both engines
of the evaluators, or a LoRA adapter. It is called with the trainer and rows, and returns JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from datasets import Dataset
from PIL import Image, ImageDraw
from transformers import TrainerCallback

from adora_vl.data.dataset import schema
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation, conversation_with_images
from adora_vl.doctor.engine import EngineChecker, run_engine_checks
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.local import TransformersEngine
from adora_vl.evals.inference.requests import AnswerEngineSettings, AnswerRequest
from adora_vl.evaluation import SamplerEngine
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.rollout import turns
from adora_vl.rollout.importance import drift_over_ranks
from adora_vl.rollout.rollouts import Call
from adora_vl.utils.checks import as_json
from tests.support.launch import accelerate_launch

if TYPE_CHECKING:
    from adora_vl.preflight.resolved_run import ResolvedRun
    from adora_vl.tools.run import Toolbox
    from adora_vl.trainer import AdoraGRPOTrainer
    from adora_vl.types import StepContext

Rows = Sequence[dict[str, Any]]
KEYS_WITH_ENGINE: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.25,
    "vllm_max_model_length": 512,
    "max_completion_length": 24,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 3,
}


def training_data_set(rows: Rows, system_prompt: str = SYSTEM_PROMPT) -> Dataset:
    """Return a data set of these rows with the column `prompt`, as a training reads it."""
    prompts = [conversation(row["problem"], system_prompt) for row in rows]
    return Dataset.from_list(list(rows), features=schema()).add_column("prompt", prompts)


class GradientRecorder(TrainerCallback):
    """A callback that copies all gradients before each optimizer step.

    `steps` has for each step the gradients by parameter name. A model sharded by ZeRO-3 has none.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )


def checker_of(trainer: AdoraGRPOTrainer, rows: Rows) -> EngineChecker:
    """Return the object with which the doctor compares a trainer with its engine on some rows."""
    engine_and_policy = trainer.parts.engine_and_policy
    return EngineChecker(
        engine_and_policy, engine_and_policy.read_prompts(rows), models=trainer.models_by_role()
    )


def run_doctor_checks(trainer: Any, rows: Rows) -> list[dict[str, Any]]:
    """Return the checks of the doctor's table that need an engine, as JSON.

    Some checks look at the first row alone. So the first row is moved to the end: of mixed rows the
    second has no images.
    """
    merge = trainer.processing_class.image_processor.merge_size
    checker = checker_of(trainer, [*rows[1:], *rows[:1]])
    return as_json(run_engine_checks(checker, merge))


def answer_by_both_engines(trainer: Any, rows: Rows) -> dict[str, list[Any]]:
    """Return the greedy answers to all rows by the trainer's vLLM, and by Transformers.

    Transformers answers with the saved model and the same tools. By "vllm" and "transformers", the
    fields of each reply.
    """
    folder = f"{trainer.args.output_dir}/saved"
    trainer.save_model(folder)
    requests = [
        AnswerRequest(
            conversation_with_images(row["problem"], len(row["images"])), list(row["images"])
        )
        for row in rows
    ]
    longest = trainer.args.max_completion_length
    transformers = TransformersEngine(
        AnswerEngineSettings(model=folder, engine="transformers", max_tokens=longest)
    )
    engine = SamplerEngine(
        trainer.parts.engine_and_policy,
        trainer.parts.generation_sampler.group_sampler,
        ChatProcessor(folder),
        end_tokens=trainer.eos_token_ids,
    )
    transformers.tool_loop = engine.tool_loop
    return {
        name: list(map(vars, evaluator.generate(requests)))
        for name, evaluator in (("vllm", engine), ("transformers", transformers))
    }


def measure_adapter_drift(trainer: Any, rows: Rows) -> dict[str, float]:
    """Give the policy a LoRA adapter with random weights, sync it to the engine, and measure drift.

    Returns, in nats per token: "mean_logp_change", the mean change of the policy's
    log-probabilities by the adapter, and "gap", the largest difference of engine and policy after
    the sync. The trainer keeps the adapter, which is in all parts of the model.
    """
    from peft import LoraConfig, get_peft_model

    checker = checker_of(trainer, rows)
    engine_and_policy = trainer.parts.engine_and_policy
    rollouts = checker.sample("before the adapter")
    logps_before_BC = engine_and_policy.policy_logps(rollouts)
    torch.manual_seed(0)
    adapted = get_peft_model(
        trainer.model, LoraConfig(r=4, target_modules=["q_proj", "down_proj", "linear_fc2"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trainer.model = trainer.vllm_generation.model = adapted
    logp_change = drift_over_ranks(
        engine_and_policy.accelerator,
        engine_and_policy.policy_logps(rollouts),
        logps_before_BC,
        rollouts.mask_BC,
    )
    trainer.vllm_generation.sync_weights()
    gap = checker.compare("with the adapter")
    return {"mean_logp_change": logp_change.mean, "gap": gap.largest}


class DrawnPictureTools:
    """A toolbox that answers most turns, whatever they say, with a text and up to two pictures.

    Answers and the sizes of pictures are drawn by the seed of a call, which `seeds` records.
    """

    view = None  # no call refers to points of a picture

    @classmethod
    def of_process(cls) -> None:
        """Give these tools to every trainer of this process, until it ends."""
        mock.patch.object(turns, "CALL_TAG", "").start()
        cls().in_trainers().__enter__()

    def __init__(self) -> None:
        self.seeds: list[str] = []

    def in_trainers(self) -> AbstractContextManager[object]:
        """Return a context manager in which every new trainer has these tools."""
        from adora_vl.parts import StepParts

        def build_with_tools(
            trainer: AdoraGRPOTrainer, run: ResolvedRun, context: StepContext, **arguments: object
        ) -> object:
            tools = cast("Toolbox", self)
            run = replace(run, prompts=replace(run.prompts, toolbox=tools))
            return StepParts(trainer, run, context, **arguments)  # type: ignore[arg-type]

        return mock.patch("adora_vl.trainer.StepParts", build_with_tools)

    def answer(
        self,
        text: str,
        images: Sequence[Image.Image],
        *,
        seed: str,
        last: bool,
        environment: Any,
    ) -> Any:
        """Return the answer to a turn, or None: then the rollout has ended."""
        draw = random.Random(seed)
        self.seeds.append(seed)
        if draw.random() < 0.3:
            return None
        parts: list[Any] = ["<tool_response>\nSee <|image_pad|>"]
        for _ in range(draw.choice((0, 1, 1, 1, 2))):
            size = draw.choice((28, 56, 84, 112)), draw.choice((28, 56, 84))
            image = Image.new("RGB", size, "white")
            ImageDraw.Draw(image).line(
                [(draw.randrange(28), draw.randrange(28)), size], "black", width=3
            )
            parts += ["\n", image]
        call = Call(
            name="draw",
            arguments=seed,
            text="",
            seconds=0.0,
            failed=False,
        )
        return SimpleNamespace(parts=(*parts, "\n</tool_response>"), calls=(call,))


# The keys of runs with `DrawnPictureTools`.
KEYS_FOR_DRAWN_TOOLS: dict[str, Any] = {
    "max_completion_length": 256,
    "max_tool_calling_iterations": 2,
}


Inspection = Callable[[Any, Rows], Any]
INSPECTIONS_BEFORE_TRAINING: dict[str, Inspection] = {
    "doctor": run_doctor_checks,
    "answers": answer_by_both_engines,
}  # the updates; they change nothing
INSPECTIONS_AFTER_TRAINING: dict[str, Inspection] = {"lora": measure_adapter_drift}
PARITY_RUN_COMMAND = ("-m", "tests.parity.parity_run")


def run_parity(
    tmp_path: Path, config: str, *argv: str, check: bool = True, model: Path = PRETRAINED_FOLDER
) -> dict[str, Any]:
    """Run `tests/parity/parity_run.py`, and return the JSON that it writes.

    "returncode" and "stderr" of the process are added.

    Args:
        tmp_path: gets the file.
        config: the accelerate config.
        argv: options of the script.
        check: whether an exit code other than 0 fails the test.
        model: the model that is trained.
    """
    output = tmp_path / "result.json"
    completed = accelerate_launch(
        config,
        *PARITY_RUN_COMMAND,
        "--model",
        str(model),
        "--output",
        str(output),
        *argv,
        check=check,
    )
    result: dict[str, Any] = json.loads(output.read_text()) if output.is_file() else {}
    return {**result, "returncode": completed.returncode, "stderr": completed.stderr}
