"""TRL's trainer with a clock on its phases and a record of what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl.trainer import grpo_trainer

from adora_vl.guarded import GuardedGRPOTrainer
from adora_vl.record.metrics_file import MetricsFile
from adora_vl.record.phases import PhaseClock
from adora_vl.record.progress import ProgressLine
from adora_vl.record.rollouts import Columns, Record, criteria_columns, weighted_sum
from adora_vl.record.texts import gather_texts
from adora_vl.replaced import replaced
from adora_vl.rewards.completion import completion_text
from adora_vl.rollout.drift import rollout_drift

Card = Callable[[list[dict[str, Any]], int], str]  # from the log and the step
_SETTINGS = ("num_generations", "scale_rewards", "loss_type", "reward_weights")
_TABLE = {
    "verdict": "verdict",
    "extracted": "extracted",
    "reason": "reason",
    "advantage_raw": "advantage_raw",
    "adora_weight": "weight",
    "adora_tds": "tds",
}  # our columns of TRL's completions table


class StepClock(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """A step is the policy's time but for what lies in another phase; each step's seconds go into the log.

    What lies between two steps (loading data, saving, evaluating) is `other` of the later one.
    """

    def __init__(self, trainer: RecordedGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.take()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.enter("policy")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.leave()
        for phase, seconds in self.trainer.clock.take().items():
            self.trainer.log_figure(f"seconds/{phase}", seconds)


class KeepRecord(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """The first rank writes a step's rollouts at its end, before anything is saved."""

    def __init__(self, trainer: RecordedGRPOTrainer) -> None:
        self.trainer, self.record = trainer, trainer.record

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.diagrams.forget()
        if state.is_world_process_zero:
            self.record.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.complete_record()
        self.record.flush(state.global_step)


class RecordedGRPOTrainer(GuardedGRPOTrainer):
    """As `trl.GRPOTrainer`; it says what it does on screen, in `metrics.jsonl` and in the record of the rollouts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing but the arguments of `trl.GRPOTrainer`."""
        self.clock = PhaseClock()
        self._counted = 0  # this rank's rollouts in the present step
        self._spans: list[slice] = []  # those that are recorded, a generation each
        self.card: Card | None = None  # writes the README.md of every saved model
        super().__init__(*args, **kwargs)
        # Stock TRL gathers all images for the trackers' tables even where there is no such table.
        tables = self.log_completions and {"wandb", "trackio"} & set(self.args.report_to)
        self.log_multimodal = bool(self.args.log_multimodal and tables)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self._timed("sync", self.vllm_generation.sync_weights)
        for noisy in (ProgressCallback, PrinterCallback):
            self.remove_callback(noisy)
        own = [each.name for each in fields(self.args) if each.name.startswith("adora_")]
        settings = {name: getattr(self.args, name) for name in (*own, *_SETTINGS)}
        settings["truncated_at"] = self.args.truncated_at
        folder, ranks = Path(self.args.output_dir), self.accelerator.num_processes
        self.record = Record(folder, self.args.adora_record_gb, settings, ranks)
        for callback in (StepClock(self), KeepRecord(self), ProgressLine(), MetricsFile()):
            self.add_callback(callback)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Stock TRL saves weights and processor; ours puts a card beside them, in checkpoints too, where one is set."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self.write_card(Path(output_dir or self.args.output_dir))

    def write_card(self, folder: Path) -> None:
        """README.md of the model in `folder`. One process calls this."""
        if self.card is not None:
            card = self.card(self.state.log_history, self.state.global_step)
            (folder / "README.md").write_text(card, encoding="utf-8")

    def create_model_card(self, model_name: Any = None, dataset_name: Any = None, tags: Any = None) -> None:
        """Stock TRL writes a card of its own into output_dir at every save, which would take the place of ours."""
        if self.card is None:
            super().create_model_card(model_name, dataset_name, tags)

    def _timed(self, phase: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(phase):
                return call(*args, **kwargs)

        return timed

    def _generate(self, prompts: list[Any]) -> Any:
        """Stock TRL processes the images, samples and decodes here, and times it for wandb alone; ours for the log."""
        with self.clock.phase("rollout"):
            return super()._generate(prompts)

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Stock TRL calls the reward functions here, and times them for wandb alone; ours for the log."""
        with self.clock.phase("grading"):
            rewards_BF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return rewards_BF

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Stock TRL sends every rank the prompts of all ranks for its table of completions, with their images, which
        the table leaves out; ours sends the texts.
        """
        with replaced(grpo_trainer, "gather_object", gather_texts):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output

    @property
    def _is_recorded(self) -> bool:
        """Whether the generation of this step is one of every `adora_record_every`."""
        args = self.args
        cycle_steps = max(1, args.steps_per_generation * self.num_iterations // args.gradient_accumulation_steps)
        every: int = args.adora_record_every
        return every > 0 and self.state.global_step // cycle_steps % every == 0

    def record_rollouts(
        self, inputs: list[dict[str, Any]], output: dict[str, Any], rewards_BF: Tensor, facts_B2: Tensor
    ) -> None:
        """Call it on all ranks when the advantages are final. `rewards_BF` and `facts_B2` (tokens, whether without an
        end-of-turn token) are all ranks', `inputs` and `output` this one's.
        """
        self._counted += len(inputs)
        if not self._is_recorded:
            return
        self._spans.append(slice(self._counted - len(inputs), self._counted))
        with self.clock.phase("other"):
            drift_B = torch.full((len(inputs),), torch.nan, device=self.accelerator.device)
            if "old_per_token_logps" in output and "sampling_per_token_logps" in output:
                names = ("old_per_token_logps", "sampling_per_token_logps", "completion_mask")
                drift_B = rollout_drift(*(output[name] for name in names))
            drift_B = self.accelerator.gather(drift_B)
            rows = gather_object([self._row(one) for one in inputs])
            if self.accelerator.is_main_process and not self.record.failed:
                columns = self._columns(rewards_BF, facts_B2, drift_B)
                columns |= {name: [row[name] for row in rows] for name in rows[0]}
                self.record.add(columns, self.num_generations)

    def late_drift(self) -> list[float]:
        """Of this rank's rollouts of the step, in nats a token, where it is known only now; NaN where not."""
        return []

    def complete_record(self) -> None:
        """At the end of a step, on all ranks: what was not known when the rollouts were recorded."""
        late, spans = self.late_drift(), self._spans
        self._counted, self._spans = 0, []
        if not late or not spans:
            return
        drift_RB = self.accelerator.gather(torch.tensor(late, device=self.accelerator.device)[None])
        if self.accelerator.is_main_process:
            self.record.set_drift([drift_RB[:, span].flatten().tolist() for span in spans])

    def _row(self, one: dict[str, Any]) -> dict[str, Any]:
        """What the dataset says of a rollout."""
        row = None if one.get("id") is None else str(one["id"])
        try:
            images = self.record.diagrams.keep(row, one.get("images") or [])
        except OSError:  # a full disk: the record goes without this diagram
            images = []
        problem = one.get("problem") or completion_text(one["prompt"])
        return {"id": row, "problem": problem, "answer": one.get("answer"), "images": images}

    def _columns(self, rewards_BF: Tensor, facts_B2: Tensor, drift_B: Tensor) -> Columns:
        """What the step says of all ranks' rollouts, much of it from the completions table that TRL keeps."""
        args, count = self.args, len(rewards_BF)
        rewards_B, generations = weighted_sum(rewards_BF, self.reward_weights), self.num_generations
        by_length = args.adora_truncation == "length"
        truncated_B = facts_B2[:, 0] >= args.truncated_at if by_length else facts_B2[:, 1] > 0
        groups = [tensor.view(-1, generations) for tensor in (rewards_B, facts_B2[:, 0], truncated_B)]
        table = {"advantage": self._logs["advantages"]}
        table |= {ours: self._logs["extra"].get(name, ()) for name, ours in _TABLE.items()}
        parts = {f"reward/{name}": rewards_BF[:, i].tolist() for i, name in enumerate(self.reward_func_names)}
        return {
            "step": [self.state.global_step + 1] * count,
            "completion": [completion_text(one) for one in list(self._logs["completion"])[-count:]],
            "reward": rewards_B.tolist(),
            **parts,
            **{name: list(column)[-count:] for name, column in table.items()},
            **criteria_columns(args.adora_correct_above, *groups),
            "length": [int(length) for length in facts_B2[:, 0].tolist()],
            "truncated": truncated_B.tolist(),
            "drift": drift_B.tolist(),
        }
