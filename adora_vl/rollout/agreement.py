"""Compares engine and trainer on a few real prompts.

A difference up to the bounds below is explained by rounding.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.context_limit import served_length
from adora_vl.data.loading import unreadable_rows
from adora_vl.models.precision import dtype_name
from adora_vl.rollout.engine_pair import EnginePair, Prompts, Rollouts
from adora_vl.rollout.engine_settings import training_dtype
from adora_vl.rollout.importance import Drift
from adora_vl.rollout.prompt_tokens import PromptMismatchError, never_sampled_ids
from adora_vl.utils.checks import Check, Status, failed, is_healthy, passed, skipped
from adora_vl.utils.errors import RolloutError

TOKENS = 24  # largest number of tokens of a probing rollout
KINDS = "mm_token_type_ids"
CHECK_ROWS = 2  # prompts of each rank in the check before training
CHECK_TOKENS = 8  # largest number of tokens of a rollout of that check
# Names of checks; below them are the remedies for one that fails.
PROMPTS = "engine reads the trainer's prompts"
COLD = "agreement, cold"
DISTANT = "agreement, far from the start"

PIXELS = (
    "give both sides the same limits: min_pixels and max_pixels in the config, not in a processor "
    "of your own, and the tokenizer and chat template of the model folder"
)
DTYPE = (
    "set adora_vllm_dtype: auto (or the policy's own dtype); then compare tokenizer, template and "
    "pixel limits in the model folder with the trainer's"
)
POSITIONS = (
    "the rotary angles of engine and trainer differ, by more with each token: compare "
    "rope_parameters in the model folder with the trainer's and look for a cast of buffers in "
    "code of your own; report it with this table"
)


# Largest mean difference in nats per token, by dtype. float32 was measured at 1e-6 here; bfloat16
# is reported to give 0.01 to 0.05 (see adora_max_drift).
BOUNDS = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}


def agreement_bound(pair: EnginePair) -> float:
    """Return the largest mean difference of engine and trainer that passes, in nats per token.

    The coarser dtype of the two decides, but the bound is never above adora_max_drift. Where the
    engine scores tokens after temperature, filters or penalties, adora_max_drift alone is the
    bound.
    """
    assert pair.engine is not None
    args = pair.config
    weight_dtype = dtype_name(pair.policy().dtype)
    engine_dtype = pair.engine.settings.dtype or weight_dtype
    policy_dtype = training_dtype(args) or weight_dtype
    largest = max(BOUNDS.values())  # of a dtype that is not in the table
    rounding = max(BOUNDS.get(engine_dtype, largest), BOUNDS.get(policy_dtype, largest))
    if args.adora_max_drift is None:
        return rounding
    max_drift = float(args.adora_max_drift)
    is_filtered = (
        args.temperature != 1.0
        or args.top_p != 1.0
        or args.top_k > 0
        or args.min_p
        or args.repetition_penalty != 1.0
    )
    return max_drift if is_filtered else min(rounding, max_drift)


def distant_bound(pair: EnginePair) -> float:
    """Return the bound for answers that begin at about position 2,000.

    It is a tenth of `agreement_bound` in float32, else the same. Rounded rotary frequencies moved
    the tiny model's answers by 0.01 nats there, and two right float32 passes agree to 1e-6. In
    bfloat16 two right passes differ by as much, so a smaller bound would prove nothing.
    """
    bound = agreement_bound(pair)
    return bound / 10 if bound <= BOUNDS["float32"] else bound


POSITION = 2000  # about where an answer to a moved prompt begins
ROWS = 2  # moved prompts of each rank


def far_prompts(pair: EnginePair, prompts: Prompts, tokens: int) -> Prompts | None:
    """Return some of `prompts`, each moved back by tokens of its own text in random order.

    The prompts grow by as many tokens as leave room for `tokens` sampled ones, up to `POSITION` in
    all, and by equally many on all ranks. None where there is no room.
    """
    near = head(prompts, ROWS)
    policy_limit = pair.policy().config.get_text_config().max_position_embeddings
    if pair.config.vllm_mode == "server":
        engine_limit = served_length(pair.config) or policy_limit
    else:
        assert pair.engine is not None
        engine_limit = pair.engine.llm.llm_engine.model_config.max_model_len
    longest_prompt = max(map(len, near.ids))
    room = min(POSITION, min(policy_limit, engine_limit) - tokens) - longest_prompt
    shift = min(gather_object([room]))  # the same on all ranks, since the passes are collective
    if shift <= 0:
        return None
    special_ids = {*pair.tokenizer.all_special_ids, *never_sampled_ids(pair.tokenizer)}
    rng = random.Random(pair.config.seed)  # one of its own: the run's random state stays
    ids = []
    for prompt_ids in near.ids:
        text_ids = [token for token in prompt_ids if token not in special_ids]
        ids.append([*rng.choices(text_ids, k=shift), *prompt_ids])
    fields = dict(near.fields)
    if KINDS in fields:
        fields[KINDS] = [[0] * shift + row for row in fields[KINDS]]
    return replace(near, ids=ids, fields=fields)


def head(prompts: Prompts, rows: int) -> Prompts:
    """Return the first `rows` prompts, with the fields of their images."""
    fields = dict(prompts.fields)
    if prompts.images is not None:
        image_count = sum(prompts.num_images[:rows])
        grids = fields["image_grid_thw"][:image_count]
        patch_count = int(grids.prod(dim=-1).sum())
        fields["image_grid_thw"] = grids
        fields["pixel_values"] = fields["pixel_values"][:patch_count]
        fields[KINDS] = fields[KINDS][:rows]
    return Prompts(
        messages=prompts.messages[:rows],
        ids=prompts.ids[:rows],
        images=prompts.images and prompts.images[:rows],
        fields=fields,
        names=prompts.names[:rows],
    )


class OtherRankError(RolloutError):
    """Another rank has failed, so that this one has nothing to compare."""


def judge(name: str, drift: Drift, bound: float, remedy: str, note: str = "") -> Check:
    """Return the check that a difference in nats is within `bound`.

    `note` is added to its detail.
    """
    detail = f"{drift.mean:.2g} nats per token, at most {drift.largest:.2g} (bound {bound:g}){note}"
    return passed(name, detail) if drift.mean <= bound else failed(name, detail, remedy)


@dataclass
class EngineProbe:
    """Compares an engine with its policy on `prompts`.

    All ranks call every method together.
    """

    pair: EnginePair
    prompts: Prompts
    tokens: int = TOKENS

    @property
    def bound(self) -> float:
        """The largest mean difference that passes, in nats per token."""
        return agreement_bound(self.pair)

    def sampled(
        self,
        where: str,
        tokens: int | None = None,
        prompts: Prompts | None = None,
        **overrides: Any,
    ) -> Rollouts:
        """Return rollouts of `prompts` (None: the probe's), from `sample`.

        An error of one rank is raised on all of them, so that none waits for another.
        """
        problem: Exception | None = None
        rollouts: Rollouts | None = None
        try:
            tokens = tokens or self.tokens
            rollouts = self.pair.sample(
                prompts or self.prompts, tokens=tokens, where=where, **overrides
            )
        except Exception as error:
            problem = error
        message = "" if problem is None else str(problem) or type(problem).__name__
        problems = [text for text in gather_object([message]) if text]
        if problem is not None:
            raise problem
        if problems:
            raise OtherRankError(problems[0])
        assert rollouts is not None
        return rollouts

    def drift(self, where: str, prompts: Prompts | None = None) -> tuple[Drift, Rollouts, Tensor]:
        """Sample from `prompts` and compare the engine's log-probabilities with the policy's.

        Returns the difference, the rollouts, and the policy's log-probabilities of them, (B, C).
        """
        rollouts = self.sampled(where, prompts=prompts)
        logps_BC = self.pair.score(rollouts)
        drift = self.pair.difference(logps_BC, rollouts.logps_BC, rollouts.mask_BC)
        return drift, rollouts, logps_BC

    def cold(self) -> list[Check]:
        """Check prompts and log-probabilities with the present weights, after a sync."""
        self.pair.give_weights()
        try:
            drift, _, _ = self.drift("cold")
        except OtherRankError as error:
            return [
                skipped(PROMPTS, f"on another rank: {error}"),
                skipped(COLD, "the prompts differ"),
            ]
        except PromptMismatchError as error:
            where = f"{self.prompts.names[error.row]}: {error}"
            why = f"image tokens are expanded twice, or limits differ; {PIXELS}"
            return [failed(PROMPTS, where, why), skipped(COLD, "the prompts differ")]
        ids = self.prompts.ids
        read = passed(PROMPTS, f"{len(ids)} prompts, {sum(map(len, ids))} tokens")
        return [read, judge(COLD, drift, self.bound, DTYPE)]

    def cold_on_all_ranks(self) -> list[Check]:
        """Run `cold`, and `distant` if it passes; returns each check's worst result of any rank."""
        checks = worst_of_all_ranks(self.cold())
        if not is_healthy(checks):
            return checks
        return [*checks, *worst_of_all_ranks([self.distant()])]

    def distant(self) -> Check:
        """Check log-probabilities, without a sync, far from the start.

        Some prompts are moved back to about position 2,000, or as far as there is room. Where the
        same weights agree near the start and not there, the rotary positions differ.
        """
        far = far_prompts(self.pair, self.prompts, self.tokens)
        if far is None:
            return skipped(
                DISTANT, "model and engine take no longer prompts (vllm_max_model_length)"
            )
        drift, _, _ = self.drift("far", far)
        begin = min(gather_object([len(ids) for ids in far.ids]))
        return judge(
            DISTANT,
            drift,
            distant_bound(self.pair),
            POSITIONS,
            f", answers from position {begin} on",
        )


def worst_of_all_ranks(checks: list[Check]) -> list[Check]:
    """Return each check's worst result of any rank, the same on all ranks. Collective."""
    severity = list(Status)  # from the best to the worst
    results_by_check = zip(*gather_object([checks]), strict=True)
    return [
        max(results, key=lambda check: severity.index(check.status)) for results in results_by_check
    ]


class SelfCheck(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Refuses to train where trainer and vLLM, in this process or on servers, disagree.

    It changes nothing in the run, neither a random state nor a metric. Rollouts of `transformers`
    need no check, since the policy samples them itself.
    """

    def __init__(self, pair: EnginePair) -> None:
        self.pair = pair

    def on_train_begin(
        self, args: AdoraGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare engine and trainer, once the model is wrapped and a checkpoint is loaded.

        Raises `RolloutError` on all ranks alike.
        """
        pair = self.pair
        if pair.engine is None:
            return
        rows = pair.first_rows(CHECK_ROWS)
        # The step that draws an unreadable row reports it, on all ranks.
        if gather_object(unreadable_rows(rows)):
            return
        probe = EngineProbe(pair=pair, prompts=pair.read(rows), tokens=CHECK_TOKENS)
        checks = probe.cold_on_all_ranks()
        if pair.accelerator.is_main_process:
            for check in checks:
                if check.name in (COLD, DISTANT) and check.status is Status.PASSED:
                    # above the progress bar
                    tqdm.write(f"Self-check: engine and trainer differ by {check.detail}")
        problems = [check for check in checks if check.status is Status.FAILED]
        if problems:
            raise RolloutError(refusal(problems))


def refusal(problems: list[Check]) -> str:
    """Return the message why the run does not start, and how it would start all the same."""
    lines = [
        f"{check.name}: {check.detail}. {check.remedy[0].upper()}{check.remedy[1:]}."
        for check in problems
    ]
    return (
        f"before the first step: {' '.join(lines)} Nothing would be learned from such rollouts. "
        "`python -m adora_vl.doctor` with the same arguments looks closer; --adora_self_check "
        "false trains all the same."
    )
