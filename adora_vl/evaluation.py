"""The evaluators during training: every `eval_steps`, by whoever samples for the trainer, figures
into the log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from adora_vl.data.prompts import asks_for_answer_tags
from adora_vl.evals.benchmark import data_options, for_data, loaded, named
from adora_vl.evals.inference.chat import ChatProcessor
from adora_vl.evals.inference.local import Conversations
from adora_vl.evals.inference.runner import Ask, answer, refuse_control_tokens
from adora_vl.evals.inference.views import VIEWS, shown_as
from adora_vl.evals.scoring.files import figures_in_training
from adora_vl.utils.cli import amount
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.data.prompt_lengths import OverlongPrompts, Size
    from adora_vl.evals.records import Benchmark, Problem
    from adora_vl.rollout.agreement import HasEngine


@dataclass(frozen=True)
class Task:
    """One benchmark with its problems."""

    benchmark: Benchmark
    problems: list[Problem]
    in_data: int | None = None  # problems in the data; None: no more than `problems`


@dataclass(frozen=True)
class EvaluationPlan:
    """What to evaluate, every how many optimizer steps, and whether before the first too.

    `prompt`: the template.
    """

    tasks: list[Task]
    every: int
    at_start: bool
    prompt: str | None = None
    delay: float = 0  # optimizer steps before which there is none: eval_delay


def take_evaluations(
    config: AdoraGRPOConfig, folders: Sequence[str], prompt: str | None = None
) -> EvaluationPlan | None:
    """The evaluations that `config` asks for, None for none; where it names none, on the training
    data's held-out splits. `folders`: of the training data. `prompt`: the template of the training
    (`adora_prompt`).

    They are then taken out of `config`, for which Transformers would want a second dataset. Raises
    `UserError`.
    """
    if config.eval_strategy == IntervalStrategy.NO:
        return None
    nothing = "adora_eval: [] with eval_strategy: steps has nothing to evaluate on"
    remedy = "name a BENCHMARK=DATA, or give the trainer an eval_dataset"
    if not config.adora_eval and not folders:
        raise UserError(f"{nothing}; {remedy}")
    entries = config.adora_eval or [f"{for_data(Path(folder))}={folder}" for folder in folders]
    loaded = [
        (entry, task) for entry in entries for task in _load(entry, config.adora_eval_limit, prompt)
    ]
    for _, task in loaded:
        refuse_control_tokens(task.problems)
    tasks = _told_apart([task for _, task in loaded], [entry for entry, _ in loaded])
    plan = EvaluationPlan(
        tasks=tasks,
        every=int(config.eval_steps),
        at_start=bool(config.eval_on_start),
        prompt=prompt,
        delay=config.eval_delay,
    )
    config.eval_strategy = IntervalStrategy.NO
    config.eval_on_start = False
    return plan


def fitting_evaluations(plan: EvaluationPlan, overlong: OverlongPrompts) -> EvaluationPlan:
    """The plan with the problems that leave the engine room for an answer. Raises `UserError`."""
    tasks = []
    for task in plan.tasks:
        rows = ((one.pid, one.prompt, _image_sizes(one)) for one in task.problems)
        kept = overlong.fits(rows, len(task.problems), f" of the evaluation {task.benchmark.name}")
        tasks.append(replace(task, problems=[task.problems[number] for number in kept]))
    return replace(plan, tasks=tasks)


def _image_sizes(problem: Problem) -> Sequence[Size | None]:
    try:
        return (
            problem.sizes()
            if problem.sizes is not None
            else [image.size for image in problem.images()]
        )
    except (
        Exception
    ):  # a decoder raises whatever it likes on a broken file; the evaluation counts such a problem
        return [None] * problem.n_images


def _told_apart(tasks: list[Task], entries: Sequence[str]) -> list[Task]:
    """The tasks with different names for the log: a benchmark on several data has their folders'
    names behind its own.

    Raises `UserError` where two have the same name even so.
    """
    names = [task.benchmark.name for task in tasks]
    made: list[Task] = []
    for task, name, entry in zip(tasks, names, entries, strict=True):
        if names.count(name) > 1:
            folder = Path(entry.partition("=")[2].removesuffix(":views")).name
            longer = f"{name}_{re.sub(r'[^0-9A-Za-z]+', '_', folder)}"
            taken = any(longer == other.benchmark.name for other in made)
            if taken:
                raise UserError(
                    f"adora_eval: {entry!r} has the name {longer!r} of another one; rename its "
                    "folder"
                )
            task = replace(task, benchmark=replace(task.benchmark, name=longer))
        made.append(task)
    return made


class DataMissingError(UserError):
    """The data of an evaluation are not on this machine."""


def _load(entry: str, limit: int | None, prompt: str | None) -> list[Task]:
    """The benchmark of an entry; behind `DIR:views` once for each view, all of the same problems."""
    name, _, path = entry.partition("=")
    path, views = path.removesuffix(":views"), path.endswith(":views")
    if not path:
        raise UserError(
            f"adora_eval: {entry!r} is not BENCHMARK=DATA; write what it is to be asked, "
            "problems=DIR"
        )
    benchmark = named(name, "adora_eval")
    options = data_options(benchmark, path, prompt)
    try:
        problems = loaded(benchmark, options).problems
    except UserError as error:
        if Path(path).exists():
            raise
        raise DataMissingError(str(error)) from error
    if not problems:
        raise UserError(f"adora_eval: {path!r} has no problems in its split {benchmark.split!r}")
    if not views:
        return [Task(benchmark, problems[:limit], len(problems))]
    told = [problem for problem in problems if problem.facts][:limit] or problems
    return [
        Task(
            replace(benchmark, name=f"{benchmark.name}_{view}"),
            shown_as(told, view),
            in_data=len(problems),
        )
        for view in VIEWS
    ]


class SamplerEngine(Conversations):
    """Answers as the evaluators' engines do, greedily, by whoever samples.

    All ranks ask together, also for nothing.
    """

    def __init__(self, trainer: HasEngine, chat: ChatProcessor) -> None:
        sample = partial(trainer.sampler.sample, settings=trainer.vllm_generation.greedy)
        longest = trainer.args.max_completion_length
        super().__init__(
            chat,
            sample,
            longest,
            256,
            ended=lambda ids: not ids or ids[-1] in trainer.eos_token_ids,
            any_rank=trainer.pool.on_any_rank,
        )
        self.turns = trainer.pool.tool_loop


class EvaluateOnTheWay(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Each rank asks for its share; rank 0 scores and logs with the step's other figures.

    Greedy decoding draws no random numbers, so a run with evaluations takes the same steps as one
    without.
    """

    def __init__(
        self,
        trainer: HasEngine,
        plan: EvaluationPlan,
        system_prompt: str | None,
        revision: str | None = None,
    ) -> None:
        """`revision`: of the base."""
        self.trainer = trainer
        self.plan = plan
        self.system_prompt = system_prompt
        self.revision = revision

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.plan.at_start and state.global_step == 0:
            self._evaluate(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.plan.every == 0 and state.global_step >= self.plan.delay:
            self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        accelerator = self.trainer.accelerator
        with self.trainer.pool.guard.watching(), self.trainer.sampler.awake():
            answered = [self._answer(task) for task in self.plan.tasks]
        tags = asks_for_answer_tags(self.system_prompt, self.plan.prompt)
        for task, rows in zip(self.plan.tasks, answered, strict=True):
            everyone = gather_object(rows)
            if accelerator.is_main_process:
                values = figures_in_training(task.benchmark, everyone, answer_tags=tags)
                self._log(task, step, values, len(everyone))
        accelerator.wait_for_everyone()

    def _answer(self, task: Task) -> list[dict[str, Any]]:
        args = self.trainer.args
        accelerator = self.trainer.accelerator
        asked = {"template": args.chat_template_kwargs, "processor": self.trainer.processing_class}
        name = self.trainer.model.name_or_path
        limits = (args.min_pixels, args.max_pixels)
        chat = ChatProcessor(name, *limits, self.revision, **asked)
        engine = SamplerEngine(self.trainer, chat)
        rows = list[dict[str, Any]]()
        share = task.problems[accelerator.process_index :: accelerator.num_processes]
        for start in range(
            0, -(-len(task.problems) // accelerator.num_processes), engine.batch_size
        ):
            batch = [Ask(problem, 0) for problem in share[start : start + engine.batch_size]]
            rows += answer(engine, batch, seed=0, system_prompt=self.system_prompt)
        return rows

    def _log(self, task: Task, step: int, values: dict[str, float], total: int) -> None:
        name = task.benchmark.name
        # an entry of its own, as Transformers' evaluations have; TRL's log would average the
        # training's figures so far
        due = self.trainer.control.should_log
        Trainer.log(self.trainer, {f"eval_{key}": value for key, value in values.items()})
        # Transformers takes this for the step's log, which would be left out
        self.trainer.control.should_log = due
        low, middle, high = (100 * values[f"{name}_accuracy{end}"] for end in ("_low", "", "_high"))
        interval = f"(95 %: {low:.1f} to {high:.1f})"
        in_data = task.in_data or total
        part = f"{total} of " if total < in_data else ""
        of = f"{part}{amount(in_data, 'problem')}"
        print(f"step {step}: {name} {middle:.1f} % {interval} of {of}", flush=True)
