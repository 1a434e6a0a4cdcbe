"""One run: the trainer and the engine that every user has, on the task.

The engine of a process serves all its runs.
"""

import gc
import json
import math
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from adora_vl import AdoraGRPOConfig, AdoraGRPOTrainer
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.utils.files import replace_file
from benchmarks.attenuation.task import (
    ChainProblem,
    ExperimentSettings,
    Trial,
    draw_chain_problems,
    is_chain,
    is_right,
)

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

    def build_once(self: Any, **kwargs: Any) -> Any:
        if not engines:
            engines.append(build(self, **kwargs))
        return engines[0]

    AdoraVLLMGeneration._build_llm = build_once  # type: ignore[method-assign]


class AnswerCounts:
    """What the rollouts of a batch are: counts by family and kind of answer, right by what the run
    rewards. Of chains those are counted too whose every step is right.
    """

    def __init__(self, reward: str) -> None:
        self.reward = reward
        self.counts: dict[str, float] = defaultdict(float)

    def add(self, text: str, problem: ChainProblem, tokens: int) -> bool:
        kind = "chain" if is_chain(text) else "guess"
        right = is_right(text, problem, self.reward)
        chain_key = "whole_chains" if text == problem.chain else ""
        family_key = f"{kind}_{problem.family}"
        for key in (
            family_key,
            f"{family_key}_right" if right else "",
            chain_key,
            "tokens_" + kind,
        ):
            if key:
                self.counts[key] += tokens if key.startswith("tokens") else 1
        return right

    def figures(self, share_a: float | None = None) -> dict[str, float | None]:
        """Accuracy, share and accuracy of chains, and mean lengths.

        `share_a`: the weight of family A in them.
        """
        n = {f: self.counts[f"chain_{f}"] + self.counts[f"guess_{f}"] for f in "AB"}
        weight = (
            {"A": share_a, "B": 1 - share_a}
            if share_a
            else {f: n[f] / max(1, sum(n.values())) for f in "AB"}
        )
        out: dict[str, float | None] = {}
        for f in "AB":
            right = self.counts[f"chain_{f}_right"] + self.counts[f"guess_{f}_right"]
            out[f"accuracy_{f}"] = right / n[f] if n[f] else None
            out[f"chains_{f}"] = self.counts[f"chain_{f}"] / n[f] if n[f] else None
        for key in ("accuracy", "chains"):
            out[key] = sum(weight[f] * (out[f"{key}_{f}"] or 0.0) for f in "AB")
        chains, guesses = (
            sum(self.counts[f"{kind}_{f}"] for f in "AB") for kind in ("chain", "guess")
        )
        out["chain_accuracy"] = self.counts["whole_chains"] / chains if chains else None
        total = self.counts["tokens_chain"] + self.counts["tokens_guess"]
        out["tokens"] = total / max(1, chains + guesses)
        return out


class HeldOutCurve(TrainerCallback):
    """Evaluates on held-out problems, with answers sampled as in training, every time from the same
    random numbers.
    """

    def __init__(self, settings: ExperimentSettings, job: Trial) -> None:
        self.settings = settings
        self.job = job
        regime = settings.regimes[job.regime]
        self.held_out = [
            problem
            for family in "AB"
            for problem in draw_chain_problems(
                settings.eval_problems, regime, f"held out/{job.regime}/{job.seed}", family
            )
        ]
        self.points: list[dict[str, Any]] = []
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (
            state.global_step % self.settings.eval_every == 0
            or state.global_step == state.max_steps
        ):
            self.evaluate(state.global_step)

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Sample answers to the held-out problems, and note the accuracy at this step."""
        model = self.trainer.model
        tokenizer = self.trainer.processing_class
        inputs = tokenizer([problem.prompt for problem in self.held_out], return_tensors="pt")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.job.seed)
            out_BT = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                top_k=0,
                max_new_tokens=self.trainer.max_completion_length,
            )
        tally = AnswerCounts(self.job.reward)
        for problem, ids in zip(
            self.held_out, out_BT[:, inputs["input_ids"].shape[1] :], strict=True
        ):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            tally.add(text, problem, int((ids != tokenizer.pad_token_id).sum()))
        self.points.append({"step": step, **tally.figures(share_a=0.75)})


def _config(settings: ExperimentSettings, job: Trial, folder: Path) -> Any:
    """Return the config of the trainer for one trial."""
    regime = settings.regimes[job.regime]
    rows = settings.prompts * settings.generations
    return AdoraGRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        use_vllm=job.engine,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=128,
        vllm_importance_sampling_mode="token_truncate",
        per_device_train_batch_size=rows,
        num_generations=settings.generations,
        max_completion_length=6 * regime.operations + 6,
        temperature=1.0,
        lr_scheduler_type="constant",
        adora_truncated="eos",
        adora_method={"adora": settings.arms[job.arm]},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=job.seed,
        adora_record_gb=0,
        **settings.training(job),
    )


def run_job(
    settings: ExperimentSettings,
    job: Trial,
    start: Path,
    facts: dict[str, str],
) -> dict[str, Any]:
    """Train one arm from a start.

    Returns its figures: held-out points, and what each generation was like.

    `facts`: what else to write down.
    """
    began = time.perf_counter()
    processor = time.process_time()
    number = settings.training(job)["max_steps"] * settings.prompts
    drawn = draw_chain_problems(
        number, settings.regimes[job.regime], f"train/{job.regime}/{job.seed}"
    )
    rows = Dataset.from_list([{"prompt": p.prompt, "number": i} for i, p in enumerate(drawn)])
    batches: list[dict[str, Any]] = []

    def graded(
        prompts: Any, completions: Any, completion_ids: Any, number: Any, **kwargs: Any
    ) -> list[float]:
        tally = AnswerCounts(job.reward)
        answers = zip(completions, number, completion_ids, strict=True)
        rewards = [float(tally.add(text, drawn[row], len(ids))) for text, row, ids in answers]
        batches.append(tally.figures())
        return rewards

    watch = HeldOutCurve(settings, job)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = AdoraGRPOTrainer(
            model=model,
            reward_funcs=graded,
            args=_config(settings, job, Path(folder)),
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(start),
            callbacks=[watch],
        )
        batches.clear()  # of the two answers that a reward is tried on
        watch.trainer = trainer
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
    for batch, entry in zip(batches, history, strict=True):
        batch |= {key.removeprefix("adora/"): entry[key] for key in LOGGED_FIGURES if key in entry}
    del trainer, watch.trainer, model
    gc.collect()
    return {
        **asdict(job),
        **facts,
        "held_out": round_figures(watch.points),
        "steps": round_figures(batches),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }


def round_figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """To four digits; what is not finite is left out."""
    return [
        {
            k: round(v, 4) if isinstance(v, float) else v
            for k, v in row.items()
            if v is not None and math.isfinite(v)
        }
        for row in rows
    ]


def write_result(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(result) + "\n")
