"""Trains a few steps with large updates, and writes how far engine and policy were apart.

Run by the parity tests on one or two ranks.

Usage: accelerate launch ... -m tests.parity.parity_run --model DIR --output FILE.json [--sabotage
NAME] [--look NAME] [key=value ...]
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

from adora_vl.types import Batch, loss_mask
from adora_vl.utils.launch import prepare_engine_environment

prepare_engine_environment()

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import yaml  # noqa: E402
from datasets import Dataset  # noqa: E402

from adora_vl.config import AdoraGRPOConfig  # noqa: E402
from adora_vl.data.prompts import SYSTEM_PROMPT  # noqa: E402
from adora_vl.models.families import component_of  # noqa: E402
from adora_vl.rewards import reward_function  # noqa: E402
from adora_vl.rollout import engine as engine_module  # noqa: E402
from adora_vl.rollout import engine_settings, engine_weights  # noqa: E402
from adora_vl.rollout import llm as llm_module  # noqa: E402
from adora_vl.synthetic.generate import generate  # noqa: E402
from adora_vl.trainer import AdoraGRPOTrainer  # noqa: E402
from tests.support.parity import (  # noqa: E402
    INSPECTIONS_AFTER_TRAINING,
    INSPECTIONS_BEFORE_TRAINING,
    KEYS_FOR_DRAWN_TOOLS,
    KEYS_WITH_ENGINE,
    DrawnPictureTools,
    Inspection,
    training_data_set,
)

PARITY_KEYS: dict[str, Any] = {
    **KEYS_WITH_ENGINE,
    "num_generations": 4,
    "adora_self_check": False,  # what it would find, the steps themselves are to find
    "max_steps": 6,
    "learning_rate": 3e-4,  # moves log-probabilities by about 10 nats in five steps of Adam
    "lr_scheduler_type": "constant",
    "max_grad_norm": 10.0,
    "log_completions": True,
    "num_completions_to_print": 1,
}


class RecordingTrainer(AdoraGRPOTrainer):
    """Records how far engine and policy are apart in each step, and what each sync sent.

    `gaps` and `means`: the largest and the mean difference of log-probabilities. `first`: the first
    generation's batch, whose log-probabilities are compared again at the end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Put a recorder before the drift guard, which sees the log-probabilities of both."""
        self.gaps: list[float] = []
        self.means: list[float] = []
        self.turns: list[int] = []
        self.first: dict[str, Any] = {}
        self.sent: list[int] = []
        self.tensors_of_last_sync = 0
        super().__init__(*args, **kwargs)
        if self.use_vllm:
            self.tensors_to_send = self.vllm_generation._tensors_to_send
            self.vllm_generation._tensors_to_send = self.counted_tensors
        drift_guard = self.parts.generation_logps.drift_guard
        check = drift_guard.check_batch

        def check_and_record(batch: Batch, step: int, logps_BC: torch.Tensor | None = None) -> None:
            scored_BC = logps_BC if logps_BC is not None else batch.get("old_per_token_logps")
            if scored_BC is not None:
                gaps_BC = (scored_BC - batch["sampling_per_token_logps"]).abs()
                in_loss_BC = loss_mask(batch).bool()
                gaps = gaps_BC[in_loss_BC]
                self.gaps.append(gaps.max().item())
                self.means.append(gaps.mean().item())
                # a later turn starts where the mask goes from the tool's tokens to the policy's
                starts_turn_BC = batch.get("tool_mask", torch.ones(0, 2)).diff() == 1
                later_turns = int(starts_turn_BC.sum(dim=1).max()) if len(starts_turn_BC) else 0
                self.turns.append(later_turns + 1)
            check(batch, step, logps_BC)

        drift_guard.check_batch = check_and_record  # type: ignore[method-assign]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Sample a generation, and record its lengths, advantages and the tensors of its sync."""
        output = super()._generate_and_score_completions(inputs)
        if not self.first:
            self.first = {**output, "pixel_values": self.pixels(output["pixel_values"])}
            self.logps_first = self.present_logps(self.first)
        self.last_advantages = output["advantages"]
        self.own_lengths = loss_mask(cast("Batch", output)).sum(dim=1)
        if self.use_vllm:
            self.sent.append(self.tensors_of_last_sync)
        return output

    def counted_tensors(self) -> Iterator[object]:
        """Yield what a weight sync sends.

        `tensors_of_last_sync` counts it.
        """
        self.tensors_of_last_sync = 0
        for named_tensor in self.tensors_to_send():
            self.tensors_of_last_sync += 1
            yield named_tensor

    def pixels(self, patch_numbers: torch.Tensor) -> torch.Tensor:
        """Return what the patch numbers of this batch stand for until the next batch is made."""
        if patch_numbers.is_floating_point():
            return patch_numbers
        bank = self.parts.images.banks.of(int(patch_numbers[0, 0]))
        return bank.pixels(bank.image_ids)[0][patch_numbers[:, 0] - bank.first_patch]

    def present_logps(self, batch: dict[str, Any]) -> torch.Tensor:
        """Score a batch with the present weights: log-probabilities (B, C)."""
        with torch.no_grad():
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
                torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
                batch["completion_ids"].size(1),
                **{
                    column: batch[column]
                    for column in (
                        "pixel_values",
                        "image_grid_thw",
                        "num_images",
                        "mm_token_type_ids",
                    )
                },
                **({"tool_mask": batch["tool_mask"]} if "tool_mask" in batch else {}),
            )
        return logps


def read_last_table(folder: str) -> dict[str, list[Any]]:
    """Return the newest completion table, with the length of each completion in tokens."""
    table = pd.read_parquet(sorted(Path(folder).glob("completions/*.parquet"))[-1])
    columns = {
        name: table[name].tolist()
        for name in ("advantage", "advantage_raw", "adora_weight", "adora_length")
    }
    rewards = table["boxed_accuracy_reward"].tolist()
    return {**columns, "reward": rewards, "length": columns["adora_length"]}


def break_one_correction(name: str) -> None:
    """Break one of our corrections of TRL, to see that the tests notice.

    `name`: `expanded` sends an image's whole run of tokens, which the engine expands again;
    `no_sync` leaves the engine's weights as they are; the two `stale` ones leave one of its caches
    from the weights before; `pixel_limits` lets it resize images otherwise. Empty breaks nothing.
    """

    def patch(module: ModuleType, attribute: str, replacement: Any) -> None:
        mock.patch.object(module, attribute, replacement).start()

    if name == "expanded":
        patch(llm_module, "collapse_image_runs", lambda ids, image_token_id: list(ids))
        patch(engine_module, "check_prompts", lambda **_: None)
    elif name == "no_sync":
        patch(engine_weights, "push_weights", lambda llm, tensors, **_: sum(1 for _ in tensors))
    elif name == "stale_encoder_cache":
        patch(engine_weights, "reset_caches", lambda llm: llm.reset_prefix_cache())
    elif name == "stale_prefix_cache":
        patch(engine_weights, "reset_caches", lambda llm: llm.llm_engine.reset_encoder_cache())
    elif name == "pixel_limits":
        limits = {"min_pixels": 28 * 28, "max_pixels": 28 * 28}
        patch(engine_settings, "pixel_limits", lambda image_processor: limits)
    elif name:
        raise SystemExit(f"unknown sabotage {name}")


def read_options() -> argparse.Namespace:
    """Parse the command line; `settings` are the keys of the config that it changes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sabotage", default="")
    parser.add_argument(
        "--prompt-repeats",
        type=int,
        default=1,
        help="of the system prompt; 9 make about 200 tokens",
    )
    parser.add_argument(
        "--mixed", action="store_true", help="problems with one, no, two and no images"
    )
    parser.add_argument("--tools", action="store_true", help="that draw pictures between the turns")
    parser.add_argument(
        "--look",
        choices={**INSPECTIONS_BEFORE_TRAINING, **INSPECTIONS_AFTER_TRAINING},
        action="append",
        default=[],
        help="at this too",
    )
    parser.add_argument("settings", nargs="*")
    options = parser.parse_intermixed_args()
    pairs = (word.split("=", 1) for word in options.settings)
    options.settings = {key: yaml.safe_load(value) for key, value in pairs}
    return options


def problems_of_run(options: argparse.Namespace) -> Dataset:
    """Return four problems, which come again at every step.

    With `--prompt-repeats` their prompts are longer than a block of the prefix cache (128 tokens on
    a CPU), so that a cache which is not reset would be hit.
    """
    rows = list(generate(4, seed=5))
    if options.mixed:
        image_counts = (1, 0, 2, 0)
        rows = [
            {**row, "images": row["images"] * count}
            for row, count in zip(rows, image_counts, strict=True)
        ]
    return training_data_set(rows, " ".join([SYSTEM_PROMPT] * options.prompt_repeats))


def build_trainer(options: argparse.Namespace, dataset: Dataset) -> RecordingTrainer:
    """Return the trainer of the run, with the parity tests' keys and those of the command line."""
    settings = options.settings
    if options.tools:
        DrawnPictureTools.of_process()
        settings = {**KEYS_FOR_DRAWN_TOOLS, **settings}
    args = AdoraGRPOConfig(
        output_dir=str(options.output.parent / "run"), **{**PARITY_KEYS, **settings}
    )
    return RecordingTrainer(
        model=options.model,
        reward_funcs=reward_function("boxed_accuracy"),
        args=args,
        train_dataset=dataset,
    )


def vision_weights(trainer: RecordingTrainer) -> dict[str, torch.Tensor]:
    """Return a copy of the vision tower's weights by their names."""
    return {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if component_of(name) == "vision_tower"
    }


def largest_change(trainer: RecordingTrainer, weights_before: dict[str, torch.Tensor]) -> float:
    """Return the largest change of any weight since `weights_before`."""
    changes = [0.0]
    for name, parameter in trainer.model.named_parameters():
        before = weights_before.get(name)
        # A sharded parameter has no numbers here.
        if before is None or before.shape != parameter.shape or not parameter.numel():
            continue
        changes.append((parameter.detach() - before).abs().max().item())
    return max(changes)


def inspections_named(
    inspections: Mapping[str, Inspection], names: Sequence[str]
) -> dict[str, Inspection]:
    """Return those inspections whose names the option `--look` has."""
    return {name: inspections[name] for name in inspections if name in names}


def inspect_trainer(
    inspections: Mapping[str, Inspection], trainer: RecordingTrainer, rows: list[Any]
) -> dict[str, Any]:
    """Return the JSON of each inspection by its name. All ranks call it."""
    return {name: inspect(trainer, rows) for name, inspect in inspections.items()}


def distances_of_run(trainer: RecordingTrainer) -> dict[str, Any]:
    """Return how far engine and policy were apart, over all ranks. All ranks call it."""
    gather = trainer.accelerator.gather
    moved_BC = (trainer.present_logps(trainer.first) - trainer.logps_first).abs()
    in_loss_BC = loss_mask(cast("Batch", trainer.first)).bool()
    largest_move = moved_BC[in_loss_BC].max()
    gaps_of_ranks = gather(torch.tensor([trainer.gaps]))
    packed_forward = trainer.parts.policy_pass.packed_forward
    return {
        "gaps": gaps_of_ranks.amax(dim=0).tolist(),
        "means": trainer.means,
        "turns": trainer.turns,
        "packed": packed_forward.pass_count,
        "packing_disabled_reason": packed_forward.disabled_reason,
        "largest_logp_change": gather(largest_move[None]).amax().item(),
        "advantages": gather(trainer.last_advantages).tolist(),
        "own_lengths": gather(trainer.own_lengths).tolist(),
        "sent": trainer.sent,
        "log": trainer.state.log_history,
    }


def main() -> None:
    """Train on the same four problems in each step, and write the differences as JSON."""
    options = read_options()
    break_one_correction(options.sabotage)
    problems = problems_of_run(options)
    trainer = build_trainer(options, problems)
    vision_at_start = vision_weights(trainer)
    first_inspections = inspections_named(INSPECTIONS_BEFORE_TRAINING, options.look)
    findings = inspect_trainer(first_inspections, trainer, list(problems))
    trainer.train()
    vision_moved = largest_change(trainer, vision_at_start)
    result = distances_of_run(trainer)
    # Counted here, because an inspection may add an adapter.
    tensors_by_component = Counter(
        component_of(name) for name, _ in trainer.model.named_parameters()
    )
    last_inspections = inspections_named(INSPECTIONS_AFTER_TRAINING, options.look)
    findings |= inspect_trainer(last_inspections, trainer, list(problems))
    if trainer.accelerator.is_main_process:
        result |= {
            "vision_moved": vision_moved,
            "table": read_last_table(trainer.args.output_dir),
            "tensors": tensors_by_component,
            "looks": findings,
        }
        options.output.write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
