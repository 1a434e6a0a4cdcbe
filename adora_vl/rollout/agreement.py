"""Do engine and trainer agree? A few real prompts through both, and the bounds of what is rounding."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import pad

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.loading import unreadable_rows
from adora_vl.data.prompt_lengths import served_length
from adora_vl.dedup.images import DistinctImages
from adora_vl.dedup.policy_pass import evaluating
from adora_vl.models.precision import HasModels, dtype_name
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.engine_settings import training_dtype
from adora_vl.rollout.importance import Drift, drift_sums, merge_drift
from adora_vl.rollout.prompt_tokens import PromptMismatchError, never_sampled_ids
from adora_vl.rollout.rollouts import RolloutAnswer, RolloutAsk, asks_of
from adora_vl.utils.checks import Check, Status, failed, is_healthy, passed, skipped
from adora_vl.utils.errors import RolloutError
from adora_vl.utils.seeding import kept_random_state

TOKENS = 24  # of a probing rollout
CHECK_ROWS, CHECK_TOKENS = 2, 8  # of each rank, and of each rollout
# Names of checks, and below them what to do where one fails.
PROMPTS = "engine reads the trainer's prompts"
COLD = "agreement, cold"
DISTANT = "agreement, far from the start"

PIXELS = (
    "give both sides the same limits: min_pixels and max_pixels in the config, not in a processor of your own, and the "
    "tokenizer and chat template of the model folder"
)
DTYPE = (
    "set adora_vllm_dtype: auto (or the policy's own dtype); then compare tokenizer, template and pixel limits in the "
    "model folder with the trainer's"
)
POSITIONS = (
    "the rotary angles of engine and trainer differ, by more with each token: compare rope_parameters in the model "
    "folder with the trainer's and look for a cast of buffers in code of your own; report it with this table"
)


class HasEngine(HasModels, Protocol):
    """What is used of a trainer whose engine is compared with its policy."""

    args: AdoraGRPOConfig
    accelerator: Accelerator
    model: PreTrainedModel
    processing_class: Any
    images: DistinctImages
    train_dataset: Dataset
    control: Any
    use_vllm: bool
    vllm_mode: str
    vllm_generation: AdoraVLLMGeneration
    sampler: Any
    pool: Any
    server_guard: Any
    eos_token_ids: Sequence[int]
    _tokenizer: PreTrainedTokenizerBase

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class Prompts:
    """Some rows as the trainer sends and reads them."""

    names: list[str]
    ids: list[list[int]]  # what goes to the engine
    images: list[list[Any] | None] | None
    fields: dict[str, Tensor]  # what goes into the forward pass beside the ids
    num_images: list[int] | None


@dataclass(frozen=True)
class Rollouts:
    """What the engine made of them."""

    prompt_ids: list[list[int]]  # as the engine read them
    completion_ids: list[list[int]]
    logps_BC: Tensor
    mask_BC: Tensor


def own_rows(trainer: HasEngine, count: int) -> list[Any]:
    """The first rows of the data set, other ones on each rank."""
    data, first = trainer.train_dataset, trainer.accelerator.process_index * count
    return [data[(first + number) % len(data)] for number in range(count)]


def read_prompts(trainer: HasEngine, rows: Sequence[Any]) -> Prompts:
    """Prompts of dataset rows, as the trainer reads them."""
    read = trainer.images.read(rows)
    names = [str(row.get("id", f"#{number}")) for number, row in enumerate(rows)]
    if read.images is None:
        return Prompts(names, read.ids, None, {}, None)
    types = [torch.tensor(one) for one in read.fields["mm_token_type_ids"]]
    fields = {**read.fields, "mm_token_type_ids": pad(types, padding_value=0, padding_side="left")}
    device = trainer.accelerator.device
    moved = {name: value.to(device) for name, value in fields.items()}
    return Prompts(names, read.ids, read.images, moved, read.num_images)


def sample(trainer: HasEngine, prompts: Prompts, *, tokens: int, where: str, **further: Any) -> Rollouts:
    """Rollouts of at most `tokens` tokens, each with a seed of its own. `further`: vLLM's parameters, beside those of
    the run.

    Raises `PromptMismatchError` where the engine reads another prompt.
    """
    with kept_random_state():
        settings = {**trainer.vllm_generation.sampling, **further}
        return _rollouts(trainer, trainer.sampler.sample(_asks(trainer, prompts, where, tokens), settings=settings))


def _asks(trainer: HasEngine, prompts: Prompts, where: str, tokens: int) -> list[RolloutAsk]:
    seed, first = (trainer.args.seed, f"check/{where}"), trainer.accelerator.process_index * len(prompts.ids)
    return asks_of(prompts.ids, prompts.images, seed=seed, first=first, generations=1, limit=tokens)


def _rollouts(trainer: HasEngine, answers: Sequence[RolloutAnswer]) -> Rollouts:
    rows = [torch.tensor([torch.nan if logp is None else logp for logp in answer.logps]) for answer in answers]
    mask = [torch.ones(len(answer.tokens), dtype=torch.long) for answer in answers]
    device = trainer.accelerator.device
    return Rollouts(
        prompt_ids=[answer.read for answer in answers],
        completion_ids=[answer.tokens for answer in answers],
        logps_BC=pad(rows, padding_value=0, padding_side="right").to(device),
        mask_BC=pad(mask, padding_value=0, padding_side="right").to(device),
    )


def score(trainer: HasEngine, prompts: Prompts, rollouts: Rollouts) -> Tensor:
    """The policy's log-probabilities of the sampled tokens, (B, C), by the pass that the loss uses."""
    device, padding = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    prompt_BP = pad([torch.tensor(row) for row in prompts.ids], padding_value=padding, padding_side="left").to(device)
    ones = [torch.ones(len(row), dtype=torch.long) for row in prompts.ids]
    prompt_mask_BP = pad(ones, padding_value=0, padding_side="left").to(device)
    completions = [torch.tensor(row) for row in rollouts.completion_ids]
    completion_BC = pad(completions, padding_value=padding, padding_side="right").to(device)
    fields: dict[str, Any] = dict(prompts.fields)
    if "mm_token_type_ids" in fields:
        kinds = fields["mm_token_type_ids"]
        fields["mm_token_type_ids"] = torch.cat([kinds, kinds.new_zeros(completion_BC.shape)], dim=1)
    checkpointing = disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs)
    with torch.no_grad(), kept_random_state(), checkpointing:
        logps, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.cat([prompt_BP, completion_BC], dim=1),
            torch.cat([prompt_mask_BP, rollouts.mask_BC], dim=1), completion_BC.size(1),
            batch_size=trainer.args.per_device_train_batch_size, num_images=prompts.num_images, **fields,
        )  # fmt: skip
    assert isinstance(logps, Tensor)
    return logps


def difference(trainer: HasEngine, one_BC: Tensor, other_BC: Tensor, mask_BC: Tensor) -> Drift:
    """How far apart two scorings are, over all ranks."""
    return merge_drift(trainer.accelerator.gather(drift_sums(one_BC, other_BC, mask_BC)[None]))


# Nats a token on average. float32 was measured at 1e-6 here; bfloat16 is said to give 0.01 to 0.05 (adora_max_drift).
BOUNDS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}


def agreement_bound(trainer: HasEngine) -> float:
    """What engine and trainer may differ by: the coarser one's rounding decides, never more than adora_max_drift."""
    own = dtype_name(trainer.model.dtype)
    engine = trainer.vllm_generation.settings.dtype or own
    args = trainer.args
    policy = training_dtype(args) or own
    rounding = max(BOUNDS.get(name, max(BOUNDS.values())) for name in (engine, policy))
    if args.adora_max_drift is None:
        return rounding
    filtered = (
        args.temperature != 1.0 or args.top_p != 1.0 or args.top_k > 0 or args.min_p or args.repetition_penalty != 1.0
    )
    return float(args.adora_max_drift) if filtered else min(rounding, float(args.adora_max_drift))


def distant_bound(trainer: HasEngine) -> float:
    """The bound for answers that begin at about position 2,000: a tenth of `agreement_bound` in float32, else the same.

    Rounded rotary frequencies moved the tiny model's answers by 0.01 nats there, and two right float32 passes agree to
    1e-6. In bfloat16 two right passes differ by as much, so a smaller bound would prove nothing.
    """
    bound = agreement_bound(trainer)
    return bound / 10 if bound <= BOUNDS["float32"] else bound


POSITION = 2000  # about where an answer begins
ROWS = 2  # prompts, of each rank


def far_prompts(trainer: HasEngine, prompts: Prompts, tokens: int) -> Prompts | None:
    """Some of `prompts`, so far back that `tokens` can still be sampled; the same distance on all ranks. None where
    there is no room.
    """
    near = head(prompts, ROWS)
    by = min(gather_object([room(trainer, near, tokens)]))
    return moved_back(trainer, near, by) if by > 0 else None


def head(prompts: Prompts, rows: int) -> Prompts:
    """The first prompts alone, with the fields of their own images."""
    ids = prompts.ids[:rows]
    if prompts.num_images is None or prompts.images is None:
        return replace(prompts, names=prompts.names[:rows], ids=ids)
    counts = prompts.num_images[:rows]
    grid = prompts.fields["image_grid_thw"][: sum(counts)]
    fields = {
        "image_grid_thw": grid,
        "pixel_values": prompts.fields["pixel_values"][: int(grid.prod(dim=-1).sum())],
        "mm_token_type_ids": prompts.fields["mm_token_type_ids"][:rows, -max(map(len, ids)) :],
    }
    return Prompts(prompts.names[:rows], ids, prompts.images[:rows], fields, counts)


def room(trainer: HasEngine, prompts: Prompts, tokens: int) -> int:
    """How many tokens fit before each prompt, with `tokens` to be sampled after it; up to `POSITION` in all."""
    model = trainer.model.config.get_text_config().max_position_embeddings
    if trainer.vllm_mode == "server":
        engine = served_length(trainer.args) or model
    else:
        engine = trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    return int(min(POSITION, min(model, engine) - tokens) - max(map(len, prompts.ids)))


def moved_back(trainer: HasEngine, prompts: Prompts, by: int) -> Prompts:
    """Each prompt after `by` tokens of its own text in random order, the same for the same seed."""
    special = {*trainer._tokenizer.all_special_ids, *never_sampled_ids(trainer._tokenizer)}
    draw = random.Random(trainer.args.seed)  # one of its own: the run's random state stays
    ids = [[*draw.choices([token for token in row if token not in special], k=by), *row] for row in prompts.ids]
    fields = dict(prompts.fields)
    if "mm_token_type_ids" in fields:
        kinds = fields["mm_token_type_ids"]
        fields["mm_token_type_ids"] = torch.cat([kinds.new_zeros(len(ids), by), kinds], dim=1)
    return replace(prompts, ids=ids, fields=fields)


def drift_measured(
    trainer: HasEngine, check: Callable[[Tensor, Tensor, Tensor, int], None], rows: Sequence[Any], step: int
) -> Callable[[], None]:
    """Ask servers that have the present weights for short rollouts of the first of these rows. Returns what scores them
    and has them checked: the policy's log-probabilities, the engine's, the mask, (B, C), and the step.
    """
    prompts = read_prompts(trainer, rows[:CHECK_ROWS])
    ticket = trainer.sampler.begin(_asks(trainer, prompts, f"drift/{step}", CHECK_TOKENS))

    def judged() -> None:
        rollouts = _rollouts(trainer, ticket.join())
        # a rank may have an image among them where another one has none
        with trainer.images.vision.unshared(), evaluating(trainer.model):
            check(score(trainer, prompts, rollouts), rollouts.logps_BC, rollouts.mask_BC, step)

    return judged


class OtherRankError(RolloutError):
    """Another rank has failed; this one has nothing to compare with."""


def check_read_prompts(prompts: Prompts, rollouts: Rollouts, image_token_id: int | None) -> Check:
    """The ids that the engine has read, token by token."""
    for name, ours, theirs in zip(prompts.names, prompts.ids, rollouts.prompt_ids, strict=True):
        if theirs and ours != theirs:  # one that read another prompt is no server of the run
            counts = [ids.count(image_token_id) if image_token_id is not None else 0 for ids in (ours, theirs)]
            detail = (
                f"{name}: the engine reads {len(theirs)} tokens ({counts[1]} of images), the trainer {len(ours)} "
                f"({counts[0]} of images)"
            )
            return failed(PROMPTS, detail, f"image tokens are expanded twice, or limits differ; {PIXELS}")
    return passed(PROMPTS, f"{len(prompts.ids)} prompts, {sum(map(len, prompts.ids))} tokens")


def judge(name: str, drift: Drift, bound: float, remedy: str, more: str = "") -> Check:
    """A line from a difference in nats."""
    detail = f"{drift.mean:.2g} nats per token, at most {drift.largest:.2g} (bound {bound:g}){more}"
    return passed(name, detail) if drift.mean <= bound else failed(name, detail, remedy)


@dataclass
class EngineProbe:
    """One trainer with its engine, and the prompts that both are compared on; on all ranks together."""

    trainer: HasEngine
    prompts: Prompts
    tokens: int = TOKENS

    @property
    def bound(self) -> float:
        return agreement_bound(self.trainer)

    def sampled(
        self, where: str, tokens: int | None = None, prompts: Prompts | None = None, **further: Any
    ) -> Rollouts:
        """Rollouts of `prompts` (None: the probe's own), as `sample`. If a rank has an error, every rank raises one, so
        that none waits for another.
        """
        problem: Exception | None = None
        rollouts: Rollouts | None = None
        try:
            tokens = tokens or self.tokens
            rollouts = sample(self.trainer, prompts or self.prompts, tokens=tokens, where=where, **further)
        except Exception as error:
            problem = error
        said = "" if problem is None else str(problem) or type(problem).__name__
        problems = [text for text in gather_object([said]) if text]
        if problem is not None:
            raise problem
        if problems:
            raise OtherRankError(problems[0])
        assert rollouts is not None
        return rollouts

    def drift(self, where: str, prompts: Prompts | None = None) -> tuple[Drift, Rollouts, torch.Tensor]:
        """How far the engine is from the policy on `prompts` (None: the probe's own), the rollouts, and the policy's
        log-probabilities of them, (B, C).
        """
        rollouts = self.sampled(where, prompts=prompts)
        logps_BC = score(self.trainer, prompts or self.prompts, rollouts)
        return difference(self.trainer, logps_BC, rollouts.logps_BC, rollouts.mask_BC), rollouts, logps_BC

    def cold(self) -> list[Check]:
        """Prompts and log-probabilities with the weights as they are."""
        self.trainer.sampler.give_weights(anew=True)
        try:
            drift, rollouts, _ = self.drift("cold")
        except OtherRankError as error:
            return [skipped(PROMPTS, f"on another rank: {error}"), skipped(COLD, "the prompts differ")]
        except PromptMismatchError as error:
            where = f"{self.prompts.names[error.row]}: {error}"
            return [failed(PROMPTS, where, PIXELS), skipped(COLD, "the prompts differ")]
        read = check_read_prompts(self.prompts, rollouts, self.trainer.vllm_generation.image_token_id)
        return [read, judge(COLD, drift, self.bound, DTYPE)]

    def cold_on_all_ranks(self) -> list[Check]:
        """`cold`, and `distant` if that passes; of each check the worst result of any rank."""
        checks = worst_of_all_ranks(self.cold())
        return [*checks, *worst_of_all_ranks([self.distant()])] if is_healthy(checks) else checks

    def distant(self) -> Check:
        """As `cold`, without a sync, with some prompts moved back to about position 2,000, or as far as there is room.

        Where the same weights agree near the start and not there, the positions differ.
        """
        far = far_prompts(self.trainer, self.prompts, self.tokens)
        if far is None:
            return skipped(DISTANT, "model and engine take no longer prompts (vllm_max_model_length)")
        drift, _, _ = self.drift("far", far)
        begin = min(gather_object([len(ids) for ids in far.ids]))
        return judge(DISTANT, drift, distant_bound(self.trainer), POSITIONS, f", answers from position {begin} on")


def worst_of_all_ranks(checks: list[Check]) -> list[Check]:
    """Of each check the worst result of any rank, the same on all ranks."""
    order = list(Status)
    columns = zip(*gather_object([checks]), strict=True)
    return [max(column, key=lambda check: order.index(check.status)) for column in columns]


class SelfCheck(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Refuses to train where vLLM, here or on servers, and trainer disagree. Changes nothing of the run: no random
    state, no figure. Rollouts of `transformers` are the policy's own.
    """

    def __init__(self, trainer: HasEngine) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is wrapped and a checkpoint is loaded by now; raises `RolloutError` on all ranks alike."""
        trainer = self.trainer
        if not trainer.use_vllm:
            return
        rows = own_rows(trainer, CHECK_ROWS)
        if gather_object(unreadable_rows(rows)):  # the step that draws the row says so, on all ranks
            return
        checks = EngineProbe(trainer, read_prompts(trainer, rows), tokens=CHECK_TOKENS).cold_on_all_ranks()
        if trainer.accelerator.is_main_process:
            for agreement in checks:
                if agreement.name in (COLD, DISTANT) and agreement.status is Status.PASSED:
                    tqdm.write(f"Self-check: engine and trainer differ by {agreement.detail}")  # above the progress bar
        problems = [check for check in checks if check.status is Status.FAILED]
        if problems:
            raise RolloutError(refusal(problems))


def refusal(problems: list[Check]) -> str:
    """Why the run does not start, and how it would all the same."""
    lines = [f"{check.name}: {check.detail}. {check.remedy[0].upper()}{check.remedy[1:]}." for check in problems]
    return (
        f"before the first step: {' '.join(lines)} Nothing would be learned from such rollouts. "
        "`python -m adora_vl.doctor` with the same arguments looks closer; --adora_self_check false trains all the "
        "same."
    )
