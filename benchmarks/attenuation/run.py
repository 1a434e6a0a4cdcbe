"""Trains one arm of the experiment, with the trainer and the engine that every user has."""

import gc
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.utils.files import replace_file
from benchmarks.attenuation.task import (
    FAMILIES,
    SHARE_OF_FAMILY_A,
    ChainProblem,
    ExperimentSettings,
    Trial,
    draw_chain_problems,
    is_chain,
    is_right,
)

# Figures of the trainer's log that the result has for each generation
LOGGED_FIGURES = (
    "adora/tds_share",
    "adora/weight_mean",
    "adora/rate_scale",
    "adora/drift",
    "entropy",
    "grad_norm",
    "loss",
)


def keep_one_engine() -> None:
    """Let the next trainer of this process take over the engine.

    The first sync of a run sends every weight, and every rollout has a seed of its own, so nothing
    of an earlier run is left.
    """
    build = AdoraVLLMGeneration._build_llm
    engines: list[Any] = []

    def build_once(self: AdoraVLLMGeneration, **kwargs: Any) -> Any:
        if not engines:
            engines.append(build(self, **kwargs))
        return engines[0]

    AdoraVLLMGeneration._build_llm = build_once  # type: ignore[method-assign]


@dataclass
class FamilyCounts:
    """The answers to the problems of one family: how many chains and guesses, how many right."""

    chains: int = 0
    guesses: int = 0
    right: int = 0

    @property
    def answers(self) -> int:
        return self.chains + self.guesses


class AnswerCounts:
    """Counts the answers of a batch, by family of problem and kind of answer.

    `whole_chains` counts the chains whose every step is right, whatever the run rewards. The other
    right answers are right by the reward of the run.
    """

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self.family_counts = {family: FamilyCounts() for family in FAMILIES}
        self.whole_chains = 0
        self.tokens = 0

    def add(self, text: str, problem: ChainProblem, tokens: int) -> bool:
        """Count an answer to a problem, and return whether it is right."""
        counts = self.family_counts[problem.family]
        answer_is_right = is_right(text, problem, self.reward)
        if is_chain(text):
            counts.chains += 1
        else:
            counts.guesses += 1
        if answer_is_right:
            counts.right += 1
        if text == problem.chain:
            self.whole_chains += 1
        self.tokens += tokens
        return answer_is_right

    def figures(self, share_a: float | None = None) -> dict[str, float | None]:
        """Return accuracy and share of chains by family and of all, and the mean length in tokens.

        A figure is None where there was no such answer.

        `share_a`: the weight of family A in the figures of all; None for its share of the answers.
        Held-out problems are equally many of both families, so they are weighted as in training.
        """
        answers = sum(counts.answers for counts in self.family_counts.values())
        chains = sum(counts.chains for counts in self.family_counts.values())
        if share_a is None:
            share_a = self.family_counts["A"].answers / max(1, answers)
        figures: dict[str, float | None] = {}
        accuracy = 0.0
        chain_share = 0.0
        for family, counts in self.family_counts.items():
            weight = share_a if family == "A" else 1 - share_a
            figures[f"accuracy_{family}"] = share_of(counts.right, counts.answers)
            figures[f"chains_{family}"] = share_of(counts.chains, counts.answers)
            accuracy += weight * counts.right / max(1, counts.answers)
            chain_share += weight * counts.chains / max(1, counts.answers)
        figures["accuracy"] = accuracy
        figures["chains"] = chain_share
        figures["chain_accuracy"] = share_of(self.whole_chains, chains)
        figures["tokens"] = self.tokens / max(1, answers)
        return figures


def share_of(count: int, total: int) -> float | None:
    """Return a count as a share of a total; None where the total is 0."""
    return count / total if total > 0 else None


class HeldOutCurve(TrainerCallback):
    """Evaluates the policy on held-out problems at the start, in between and at the end.

    Answers are sampled as in training, from the same random numbers each time.
    """

    def __init__(self, settings: ExperimentSettings, trial: Trial) -> None:
        self.settings = settings
        self.trial = trial
        self.held_out: list[ChainProblem] = []
        for family in FAMILIES:
            self.held_out += draw_chain_problems(
                settings.eval_problems,
                settings.regimes[trial.regime],
                seed=f"held out/{trial.regime}/{trial.seed}",
                family=family,
            )
        self.points: list[dict[str, Any]] = []
        self.trainer: AdoraGRPOTrainer | None = None  # until it is built

    def on_train_begin(
        self, args: AdoraGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.evaluate(0)

    def on_step_end(
        self, args: AdoraGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        is_last = state.global_step == state.max_steps
        if is_last or state.global_step % self.settings.eval_every == 0:
            self.evaluate(state.global_step)

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Sample answers to the held-out problems, and note the accuracy at this step."""
        assert self.trainer is not None
        tokenizer = self.trainer.processing_class
        inputs = tokenizer([problem.prompt for problem in self.held_out], return_tensors="pt")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.trial.seed)
            sequences_BT = self.trainer.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                top_k=0,
                max_new_tokens=self.trainer.max_completion_length,
            )
        counts = AnswerCounts(self.trial.reward)
        answers_BT = sequences_BT[:, inputs["input_ids"].shape[1] :]
        for problem, answer_T in zip(self.held_out, answers_BT, strict=True):
            text = tokenizer.decode(answer_T, skip_special_tokens=True)
            tokens = int((answer_T != tokenizer.pad_token_id).sum())
            counts.add(text, problem, tokens)
        self.points.append({"step": step, **counts.figures(share_a=SHARE_OF_FAMILY_A)})


def _config(settings: ExperimentSettings, trial: Trial, folder: Path) -> AdoraGRPOConfig:
    """Return the config of the trainer for one trial."""
    regime = settings.regimes[trial.regime]
    rows = settings.prompts * settings.generations
    return AdoraGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_vllm=trial.engine,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=128,
        vllm_importance_sampling_mode="token_truncate",
        per_device_train_batch_size=rows,
        num_generations=settings.generations,
        # One token each for digits and signs: a step such as `4+7=1;` has six. Six more leave room
        # for the end.
        max_completion_length=6 * regime.operations + 6,
        temperature=1.0,
        lr_scheduler_type="constant",
        adora_truncated="eos",
        adora_method={"adora": settings.arms[trial.arm]},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=trial.seed,
        adora_record_gb=0,
        **settings.training(trial),
    )


class CountingReward:
    """The reward of a run, 1 for a right answer and 0 for another one, which counts each batch.

    `batches` has the figures of each batch that was rewarded.
    """

    __name__ = "graded"  # in the log of the trainer

    def __init__(self, problems: Sequence[ChainProblem], reward: str) -> None:
        """Take the training's problems, in the order of their numbers, and the reward's name."""
        self.problems = problems
        self.reward = reward
        self.batches: list[dict[str, Any]] = []

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        number: Sequence[int],
        **kwargs: Any,
    ) -> list[float]:
        """Reward completions. `number`: the number of each one's problem."""
        counts = AnswerCounts(self.reward)
        rewards = []
        for text, token_ids, problem_number in zip(
            completions, completion_ids, number, strict=True
        ):
            answer_is_right = counts.add(text, self.problems[problem_number], len(token_ids))
            rewards.append(1.0 if answer_is_right else 0.0)
        self.batches.append(counts.figures())
        return rewards


def run_trial(
    settings: ExperimentSettings, trial: Trial, start: Path, facts: dict[str, str]
) -> dict[str, Any]:
    """Train one arm from a start.

    Args:
        settings: the settings of the experiment.
        trial: which arm, regime and seed.
        start: the folder of the model that the training starts from.
        facts: what else the result is to have.

    Returns:
        The result: `held_out` has the figures of each evaluation, `steps` those of each generation.
    """
    started_at = time.perf_counter()
    processor_time_before = time.process_time()
    problems = draw_chain_problems(
        settings.training(trial)["max_steps"] * settings.prompts,
        settings.regimes[trial.regime],
        seed=f"train/{trial.regime}/{trial.seed}",
    )
    rows = [{"prompt": problem.prompt, "number": number} for number, problem in enumerate(problems)]
    reward = CountingReward(problems, trial.reward)
    curve = HeldOutCurve(settings, trial)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = AdoraGRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=_config(settings, trial, Path(folder)),
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(start),
            callbacks=[curve],
        )
        reward.batches.clear()  # before a run its reward is tried on two answers
        curve.trainer = trainer
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
    for batch, entry in zip(reward.batches, log, strict=True):
        for key in LOGGED_FIGURES:
            if key in entry:
                batch[key.removeprefix("adora/")] = entry[key]
    # The next run of this process needs the memory.
    curve.trainer = None
    del trainer, model
    gc.collect()
    return {
        **asdict(trial),
        **facts,
        "held_out": round_figures(curve.points),
        "steps": round_figures(reward.batches),
        "seconds": round(time.perf_counter() - started_at, 1),
        "processor_seconds": round(time.process_time() - processor_time_before, 1),
    }


def round_figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Round figures to four digits behind the point; those that are not finite are left out."""
    rounded_rows = []
    for row in rows:
        rounded = {}
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                rounded[name] = round(value, 4) if isinstance(value, float) else value
        rounded_rows.append(rounded)
    return rounded_rows


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as a line of JSON; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(result) + "\n")
