"""TRL's `GRPOTrainer` with ADORA's weights and rollouts that can be trusted. Overrides only; the mathematics is in
`adora_vl.advantage`, the engine in `adora_vl.rollout`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from trl.trainer import grpo_trainer
from trl.trainer.utils import get_config_model_id

from adora_vl.advantage import Groups, weigh_groups
from adora_vl.checkpoint.store import facts_of
from adora_vl.config import AdoraGRPOConfig
from adora_vl.errors import RolloutError
from adora_vl.models.components import freeze
from adora_vl.models.load import limit_pixels, load_processor
from adora_vl.models.precision import restore_buffers
from adora_vl.options.advantage import adora_options, method_run
from adora_vl.passes.trainer import OnceGRPOTrainer
from adora_vl.record.rollouts import weighted_sum
from adora_vl.replaced import replaced
from adora_vl.report.metrics import adora_metrics
from adora_vl.rollout.drift import drift_message, drift_sums, merge_drift
from adora_vl.rollout.engine import AdoraVLLMGeneration, EngineSettings
from adora_vl.rollout.tokens import PromptMismatchError, never_sampled_ids


def engine_dtype(args: AdoraGRPOConfig) -> str | None:
    """The engine's dtype; for `adora_vllm_dtype: auto` what the trainer computes in (None: the policy's own dtype).

    vLLM's own `auto` turns a float32 checkpoint into bfloat16, which costs 0.04 nats a token on average.
    """
    if args.adora_vllm_dtype != "auto":
        return args.adora_vllm_dtype
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else None


class AdoraGRPOTrainer(OnceGRPOTrainer):
    """As `trl.GRPOTrainer`; `args` is an `AdoraGRPOConfig`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: AdoraGRPOConfig | None = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        """Stock TRL builds its own generation class; ours takes that place, with the same arguments.

        Raises `UserError` where a part to freeze has no parameters, or the CPU engine cannot sync this model.
        """
        args = args if args is not None else AdoraGRPOConfig()
        self.methods, self._adora = method_run(args), adora_options(args)
        revision = dict(args.model_init_kwargs or {}).get("revision")
        if processing_class is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            processing_class = load_processor(name, revision=revision)
        limit_pixels(processing_class, args.min_pixels, args.max_pixels)
        settings = EngineSettings(
            dtype=engine_dtype(args),
            revision=revision,
            max_num_batched_tokens=args.adora_vllm_max_num_batched_tokens,
            keeps_images=not args.adora_cache_images,
        )
        with replaced(grpo_trainer, "VLLMGeneration", partial(AdoraVLLMGeneration, settings=settings)):
            super().__init__(
                model=model, reward_funcs=reward_funcs, args=args, processing_class=processing_class, **kwargs
            )
        for built in (self.model, self.ref_model):
            if built is not None:
                restore_buffers(built)
        freeze(self.model, args.frozen_components)
        if not self.use_vllm:
            self._never_sample(never_sampled_ids(self._tokenizer))

    def close(self) -> None:
        """Shut a colocated engine down while its process groups still exist. Generation is over after this."""
        if self.use_vllm and self.vllm_mode == "colocate":
            self.vllm_generation.llm.llm_engine.engine_core.shutdown()

    def save_merged(self) -> Path | None:
        """With LoRA, the whole model with the adapter merged in, as `output_dir/merged`; None without LoRA.

        `output_dir` itself has the adapter alone, which neither vLLM nor the evaluators load. Under ZeRO-3 the weights
        are in pieces, and merging them is left to the user.
        """
        if not is_peft_model(self.model) or self._dist.is_zero3 or self._dist.is_fsdp:
            return None
        folder = Path(self.args.output_dir) / "merged"
        if self.accelerator.is_main_process:
            self.model.merge_and_unload().save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
            self.write_card(folder)
        self.accelerator.wait_for_everyone()
        return folder

    def _never_sample(self, ids: list[int]) -> None:
        """Stock TRL bans the image token alone when `transformers` generates; the others have no features either."""
        banned = sorted({*(self.generation_kwargs.get("suppress_tokens") or []), *ids})
        if banned:
            self.generation_kwargs["suppress_tokens"] = banned
            self.generation_config.suppress_tokens = banned

    def _calculate_rewards(
        self, inputs: list[Any], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Stock TRL returns the gathered rewards, (all ranks' B, functions); ours keeps them and the lengths."""
        rewards_BF: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        ended = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        facts_B2 = torch.tensor(
            [[len(ids), ids[-1] not in ended if ids else False] for ids in completion_ids_list],
            dtype=torch.float32,
            device=self.accelerator.device,
        )
        self._scored = (rewards_BF, self.accelerator.gather(facts_B2))
        return rewards_BF

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Stock TRL returns the step's tensors with group-normalised advantages; ours checks the drift of the
        rollouts and multiplies the advantages by the weight of their prompt.
        """
        self._seed_rollouts()
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        except PromptMismatchError as error:
            row = inputs[error.row].get("id", f"#{error.row} of this rank's batch")
            raise RolloutError(f"row {row}: {error}") from error
        training = self.model.training
        if training and "old_per_token_logps" in output and "sampling_per_token_logps" in output:
            self._compare_with_engine(
                output["old_per_token_logps"], output["sampling_per_token_logps"], output["completion_mask"]
            )
        advantages_B = self._weigh("train" if training else "eval", output)
        if training:
            first = self.accelerator.process_index * len(inputs)
            output["advantages"] = advantages_B[first : first + len(inputs)]
            self.record_rollouts(inputs, output, *self._scored)
        return output

    def _weigh(self, mode: str, output: dict[str, Any]) -> Tensor:
        """The advantages to learn from, of all ranks, (all ranks' B,), from whole groups; metrics and the table on the
        way. Evaluation is never weighed.
        """
        rewards_BF, facts_B2 = self._scored
        rewards_B = weighted_sum(rewards_BF, self.reward_weights)
        generations = self.num_generations if mode == "train" else self.num_generations_eval
        rewards_PG, lengths_PG = rewards_B.view(-1, generations), facts_B2[:, 0].view(-1, generations)
        by_length = self.args.adora_truncation == "length"
        unended_PG = facts_B2[:, 1].view(-1, generations) > 0
        groups = Groups(
            rewards_PG,
            lengths_PG,
            truncated_PG=lengths_PG >= self.args.truncated_at if by_length else unended_PG,
            tokens_PG=torch.where(unended_PG, 0.0, lengths_PG) if self.mask_truncated_completions else lengths_PG,
            surprisal_PG=self._surprisal(output, generations),
            correct_above=self.args.adora_correct_above,
            step=self.state.global_step,
        )
        weighting = weigh_groups(
            rewards_PG,
            lengths_PG,
            correct_above=groups.correct_above,
            truncated=groups.truncated_PG,
            **self._adora.weighing(groups.step),
        )
        for name, value in adora_metrics(weighting).items():
            self._metrics[mode][f"adora/{name}"].append(value)
        advantages_B: Tensor = self.accelerator.gather(output["advantages"])
        if mode == "train":
            advantages_B = self.methods(groups, advantages_B.view(-1, generations)).flatten()
            for name, value in self.methods.figures.items():
                self._metrics[mode][f"adora/{name}"].append(value)
            self.run_facts["methods"] = self.methods.state()
        self._tabulate(
            advantages_B,
            adora_weight=weighting.weights_P.repeat_interleave(generations),
            adora_tds=weighting.tds_P.repeat_interleave(generations),
            adora_length=lengths_PG.flatten(),
        )
        return advantages_B

    def _surprisal(self, output: dict[str, Any], generations: int) -> Tensor | None:
        """Nats a token of each rollout, all ranks', (P, G); None where the engine gave no log-probabilities."""
        logps_BC = output.get("sampling_per_token_logps")
        if logps_BC is None:
            return None
        mask_BC = output["completion_mask"]
        total_B = (torch.nan_to_num(logps_BC) * mask_BC).sum(dim=1)
        surprisal_B: Tensor = -self.accelerator.gather(total_B / mask_BC.sum(dim=1).clamp(min=1))
        return surprisal_B.view(-1, generations)

    def begin_at(self, checkpoint: str) -> None:
        """Also what the methods remember."""
        super().begin_at(checkpoint)
        self.methods.load(facts_of(Path(checkpoint)).get("methods", {}))

    def _tabulate(self, advantages_B: Tensor, **columns_B: Tensor) -> None:
        """The advantages as the loss gets them in TRL's completion table; the raw ones and `columns_B` beside them."""
        advantages = self._logs["advantages"]
        count = min(len(advantages_B), len(advantages))  # the table keeps the newest generation batch only
        raw = [advantages.pop() for _ in range(count)][::-1]
        advantages.extend(advantages_B[-count:].tolist())
        self._logs["extra"]["advantage_raw"].extend(raw)
        for name, column_B in columns_B.items():
            self._logs["extra"][name].extend(column_B[-count:].tolist())

    def _seed_rollouts(self) -> None:
        """Tell the engine where the run stands, in numbers that a resumed run arrives at too."""
        if self.use_vllm and self.args.adora_seeded_rollouts:
            micro_step = self._step % self.args.gradient_accumulation_steps
            where = f"{'train' if self.model.training else 'eval'}/{self.state.global_step}/{micro_step}"
            where += f"/{self._attempt}" if self._attempt else ""
            self.vllm_generation.position = (self.args.seed, where)

    def _compare_with_engine(self, logps_BC: Tensor, sampling_BC: Tensor, mask_BC: Tensor) -> None:
        """Stop, with a checkpoint, where engine and trainer disagree on the sampled tokens. All ranks stop together."""
        sums_3 = drift_sums(logps_BC, sampling_BC, mask_BC)
        drift = merge_drift(self.accelerator.gather(sums_3[None]))
        self._metrics["train"]["adora/drift"].append(drift.mean)
        bound = self.args.adora_max_drift
        if bound is None or drift.mean <= bound:
            return
        raise RolloutError(drift_message(drift, bound, self.state.global_step, str(self.save_here())))
