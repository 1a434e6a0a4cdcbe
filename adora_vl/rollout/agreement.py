"""Compares engine and policy on a few real prompts.

They have to read the same prompt, and to agree on the log-probabilities of sampled tokens up to
rounding.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

from adora_vl.config import AdoraGRPOConfig
from adora_vl.data.context_limit import server_context_length
from adora_vl.data.loading import unreadable_rows
from adora_vl.models.precision import dtype_name
from adora_vl.rollout.engine_and_policy import EngineAndPolicy, NamedPrompts, SampledRollouts
from adora_vl.rollout.engine_settings import training_dtype
from adora_vl.rollout.importance import Drift, drift_over_ranks
from adora_vl.rollout.prompt_tokens import PromptMismatchError, never_sampled_ids
from adora_vl.utils.checks import Check, Status, failed, is_healthy, passed, skipped
from adora_vl.utils.errors import RolloutError

PROBE_TOKENS = 24  # largest number of tokens of a rollout that the doctor samples
# the processor's field that is 1 at image tokens
TOKEN_TYPES_FIELD = "mm_token_type_ids"  # noqa: S105
CHECK_ROWS = 2  # prompts of each rank in the check before training
CHECK_TOKENS = 8  # largest number of tokens of a rollout of that check
FAR_POSITION = 2000  # about where an answer to a lengthened prompt begins
FAR_ROWS = 2  # lengthened prompts of each rank
# Names of checks, as reports show them. A cold engine has sampled nothing yet.
PROMPTS_CHECK = "engine reads the trainer's prompts"
AGREEMENT_CHECK = "agreement, cold"
DISTANT_CHECK = "agreement, far from the start"

# Remedies for a check that fails.
PIXELS_REMEDY = (
    "give both sides the same limits: min_pixels and max_pixels in the config, not in a processor "
    "of your own, and the tokenizer and chat template of the model folder"
)
DTYPE_REMEDY = (
    "set adora_vllm_dtype: auto (or the policy's own dtype); then compare tokenizer, template and "
    "pixel limits in the model folder with the trainer's"
)
POSITIONS_REMEDY = (
    "the rotary angles of engine and trainer differ, by more with each token: compare "
    "rope_parameters in the model folder with the trainer's and look for a cast of buffers in "
    "code of your own; report it with this table"
)

# The largest mean difference of log-probabilities that passes, in nats per token, by dtype. float32
# was measured at 1e-6 here; bfloat16 is reported to give 0.01 to 0.05 (see adora_max_drift).
MAX_DIFFERENCE_BY_DTYPE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3}


def agreement_bound(engine_and_policy: EngineAndPolicy) -> float:
    """Return the largest mean difference of engine's and policy's log-probabilities that passes.

    It is in nats per token. The rounding bound is that of the coarser of the two dtypes: 0.3, for
    example, for an engine in bfloat16 and a policy in float32.

    - Without `adora_max_drift` the rounding bound holds.
    - With a temperature, filters or penalties `adora_max_drift` holds, since these too make engine
      and policy differ.
    - Otherwise the smaller of the two holds.
    """
    assert engine_and_policy.engine is not None
    config = engine_and_policy.config
    weight_dtype = dtype_name(engine_and_policy.policy.dtype)
    engine_dtype = engine_and_policy.engine.settings.dtype or weight_dtype
    policy_dtype = training_dtype(config) or weight_dtype
    largest_bound = max(MAX_DIFFERENCE_BY_DTYPE.values())  # for a dtype that is not in the table
    engine_bound = MAX_DIFFERENCE_BY_DTYPE.get(engine_dtype, largest_bound)
    policy_bound = MAX_DIFFERENCE_BY_DTYPE.get(policy_dtype, largest_bound)
    rounding_bound = max(engine_bound, policy_bound)
    if config.adora_max_drift is None:
        return rounding_bound
    max_drift = float(config.adora_max_drift)
    # With any of these the engine samples from another distribution than the policy's own.
    changes_distribution = (
        config.temperature != 1.0
        or config.top_p != 1.0
        or config.top_k > 0
        or config.min_p
        or config.repetition_penalty != 1.0
    )
    return max_drift if changes_distribution else min(rounding_bound, max_drift)


def distant_bound(engine_and_policy: EngineAndPolicy) -> float:
    """Return the largest mean difference that passes in answers from about position 2,000 on.

    In float32 it is a tenth of `agreement_bound`. Wrong rotary frequencies moved the answers of a
    small model by 0.01 nats there, while two right passes agree to 1e-6. In coarser dtypes it is
    `agreement_bound` itself, since two right passes differ by as much as wrong frequencies cause.
    """
    bound = agreement_bound(engine_and_policy)
    return bound / 10 if bound <= MAX_DIFFERENCE_BY_DTYPE["float32"] else bound


def lengthened_prompts(
    engine_and_policy: EngineAndPolicy, prompts: NamedPrompts, max_tokens: int
) -> NamedPrompts | None:
    """Return the first `FAR_ROWS` prompts, with random tokens before each of them.

    An answer to such a prompt begins at about `FAR_POSITION` (2,000), or earlier if policy or
    engine takes no prompt of that length. The random tokens come from the text of the prompt
    itself. All prompts of all ranks get equally many. For example, prompts of 300 and 500 tokens
    get 1,500 each, and have 1,800 and 2,000 then.

    Args:
        engine_and_policy: the policy and the engine.
        prompts: the prompts of this rank.
        max_tokens: how many tokens of an answer need room after the prompt.

    Returns None where the prompts cannot be longer. Collective.
    """
    short_prompts = first_prompts(prompts, FAR_ROWS)
    longest_prompt = max(map(len, short_prompts.ids))
    max_prompt_length = min(FAR_POSITION, _context_length(engine_and_policy) - max_tokens)
    # All ranks add the same number, and return None together, since their passes are collective.
    added_count = min(gather_object([max_prompt_length - longest_prompt]))
    if added_count <= 0:  # the model or the engine takes no longer prompts
        return None
    tokenizer = engine_and_policy.tokenizer
    special_ids = {*tokenizer.all_special_ids, *never_sampled_ids(tokenizer)}
    # a generator of its own, so that the run's random state stays
    rng = random.Random(engine_and_policy.config.seed)
    ids = []
    for prompt_ids in short_prompts.ids:
        text_ids = [token for token in prompt_ids if token not in special_ids]
        ids.append([*rng.choices(text_ids, k=added_count), *prompt_ids])
    fields = dict(short_prompts.fields)
    if TOKEN_TYPES_FIELD in fields:
        fields[TOKEN_TYPES_FIELD] = [
            [0] * added_count + token_types for token_types in fields[TOKEN_TYPES_FIELD]
        ]
    return replace(short_prompts, ids=ids, fields=fields)


def _context_length(engine_and_policy: EngineAndPolicy) -> int:
    """Return the largest number of tokens, prompt and answer together, of policy and engine."""
    policy_limit = engine_and_policy.policy.config.get_text_config().max_position_embeddings
    if engine_and_policy.config.vllm_mode == "server":
        engine_limit = server_context_length(engine_and_policy.config) or policy_limit
    else:
        assert engine_and_policy.engine is not None
        engine_limit = engine_and_policy.engine.llm.llm_engine.model_config.max_model_len
    return int(min(policy_limit, engine_limit))


def first_prompts(prompts: NamedPrompts, count: int) -> NamedPrompts:
    """Return the first `count` prompts of a rank, with the pixels and grids of their images."""
    fields = dict(prompts.fields)
    images = prompts.images
    if images is not None:
        images = images[:count]
        # Grids have a row for each image, and pixels a row for each patch. For example, images with
        # the grids (1, 4, 6) and (1, 2, 2) have 24 and 4 rows of pixels.
        image_count = sum(prompts.num_images[:count])
        grids = fields["image_grid_thw"][:image_count]
        patch_count = int(grids.prod(dim=-1).sum())
        fields["image_grid_thw"] = grids
        fields["pixel_values"] = fields["pixel_values"][:patch_count]
        fields[TOKEN_TYPES_FIELD] = fields[TOKEN_TYPES_FIELD][:count]
    return NamedPrompts(
        messages=prompts.messages[:count],
        ids=prompts.ids[:count],
        images=images,
        fields=fields,
        row_names=prompts.row_names[:count],
    )


class OtherRankError(RolloutError):
    """Another rank has raised an error, and this one has nothing to compare."""


def check_drift(name: str, drift: Drift, bound: float, remedy: str, note: str = "") -> Check:
    """Return the check that log-probabilities differ by at most `bound` nats per token on average.

    Args:
        name: the check's name in reports.
        drift: the difference.
        bound: the largest mean difference that passes, in nats per token.
        remedy: what to do where it fails.
        note: is added to the figures.

    The largest difference of a single token is shown beside the mean, and has no bound.
    """
    detail = f"{drift.mean:.2g} nats per token, at most {drift.largest:.2g} (bound {bound:g}){note}"
    return passed(name, detail) if drift.mean <= bound else failed(name, detail, remedy)


@dataclass
class EngineProbe:
    """Compares the engine with the policy on some prompts. All ranks call every method together.

    vLLM computes log-probabilities of its own. If they differ from the policy's by more than
    rounding, its rollouts are not the policy's. There are B rollouts of C tokens.
    """

    engine_and_policy: EngineAndPolicy
    prompts: NamedPrompts
    max_tokens: int = PROBE_TOKENS

    @property
    def bound(self) -> float:
        """The largest mean difference of log-probabilities that passes, in nats per token."""
        return agreement_bound(self.engine_and_policy)

    def sample(
        self,
        check_name: str,
        max_tokens: int | None = None,
        prompts: NamedPrompts | None = None,
        **overrides: Any,
    ) -> SampledRollouts:
        """Sample a rollout for each prompt. Collective.

        If one rank fails, all ranks raise: this rank its own error, the others `OtherRankError`.
        Otherwise they would wait for it in the next collective call.

        Args:
            check_name: the name of the check, from which the seeds follow.
            max_tokens: the largest number of tokens of a rollout; None: that of the probe.
            prompts: the prompts of this rank; None: those of the probe.
            overrides: vLLM's sampling parameters that differ from the run's.
        """
        error: Exception | None = None
        rollouts: SampledRollouts | None = None
        try:
            rollouts = self.engine_and_policy.sample(
                prompts or self.prompts,
                max_tokens=max_tokens or self.max_tokens,
                check_name=check_name,
                **overrides,
            )
        except Exception as raised_error:
            error = raised_error
        message = ""
        if error is not None:
            message = str(error) or type(error).__name__
        # All ranks come here, whether they have an error or not.
        messages_of_ranks = [text for text in gather_object([message]) if text]
        if error is not None:
            raise error
        if messages_of_ranks:
            raise OtherRankError(messages_of_ranks[0])
        assert rollouts is not None
        return rollouts

    def compare(self, check_name: str, prompts: NamedPrompts | None = None) -> Drift:
        """Sample rollouts, and return how far engine and policy differ on their tokens. Collective.

        The arguments are those of `sample`.
        """
        rollouts = self.sample(check_name, prompts=prompts)
        policy_logps_BC = self.engine_and_policy.policy_logps(rollouts)
        return drift_over_ranks(
            self.engine_and_policy.accelerator,
            policy_logps_BC,
            rollouts.logps_BC,
            rollouts.mask_BC,
        )

    def check_agreement(self) -> list[Check]:
        """Send the weights to the engine, and check that both read and compute the same.

        Returns two checks: that the engine reads the trainer's prompts (`PROMPTS_CHECK`), and that
        it agrees with the policy on log-probabilities (`AGREEMENT_CHECK`).
        """
        self.engine_and_policy.sync_weights()
        try:
            drift = self.compare(check_name="cold")
        except OtherRankError as error:
            return [
                skipped(PROMPTS_CHECK, f"on another rank: {error}"),
                skipped(AGREEMENT_CHECK, "the prompts differ"),
            ]
        except PromptMismatchError as error:
            detail = f"{self.prompts.row_names[error.row]}: {error}"
            remedy = f"image tokens are expanded twice, or limits differ; {PIXELS_REMEDY}"
            return [
                failed(PROMPTS_CHECK, detail, remedy),
                skipped(AGREEMENT_CHECK, "the prompts differ"),
            ]
        ids = self.prompts.ids
        return [
            passed(PROMPTS_CHECK, f"{len(ids)} prompts, {sum(map(len, ids))} tokens"),
            check_drift(AGREEMENT_CHECK, drift, bound=self.bound, remedy=DTYPE_REMEDY),
        ]

    def check_distant_agreement(self) -> Check:
        """Check that engine and policy agree on tokens near position 2,000, and return the check.

        If they agree at small positions, but not at large ones, their rotary frequencies differ.
        """
        prompts = lengthened_prompts(self.engine_and_policy, self.prompts, self.max_tokens)
        if prompts is None:
            return skipped(
                DISTANT_CHECK, "model and engine take no longer prompts (vllm_max_model_length)"
            )
        drift = self.compare(check_name="far", prompts=prompts)
        first_position = min(gather_object([len(ids) for ids in prompts.ids]))
        return check_drift(
            DISTANT_CHECK,
            drift,
            bound=distant_bound(self.engine_and_policy),
            remedy=POSITIONS_REMEDY,
            note=f", answers from position {first_position} on",
        )

    def check_all(self) -> list[Check]:
        """Check the agreement at small positions, and if that passes, also at large ones.

        Returns each check's worst result of any rank, the same on all ranks.
        """
        checks = worst_of_all_ranks(self.check_agreement())
        if not is_healthy(checks):
            return checks
        return [*checks, *worst_of_all_ranks([self.check_distant_agreement()])]


def worst_of_all_ranks(checks: list[Check]) -> list[Check]:
    """Return for each check the worst result of any rank, the same on all ranks. Collective.

    For example, if two checks passed and failed on one rank, and both passed on the other rank, the
    results are passed and failed.

    `checks`: the results of this rank. Every rank has the same checks in the same order.
    """
    severities = list(Status)  # from the best to the worst
    checks_of_ranks = gather_object([checks])
    worst_checks = []
    for results_of_check in zip(*checks_of_ranks, strict=True):
        worst_checks.append(
            max(results_of_check, key=lambda result: severities.index(result.status))
        )
    return worst_checks


class SelfCheck(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Refuses to train where policy and vLLM, in this process or on servers, disagree.

    Their log-probabilities are compared on a few short rollouts. This changes nothing in the run,
    neither a random state nor a metric. Without vLLM there is nothing to check, since the policy
    samples itself.
    """

    def __init__(self, engine_and_policy: EngineAndPolicy) -> None:
        self.engine_and_policy = engine_and_policy

    def on_train_begin(
        self, args: AdoraGRPOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare engine and policy on prompts of the training data, and print the differences.

        The model is wrapped and a checkpoint is loaded by then. Raises `RolloutError` on all ranks
        if the two disagree.
        """
        engine_and_policy = self.engine_and_policy
        if engine_and_policy.engine is None:
            return
        rows = engine_and_policy.first_rows(CHECK_ROWS)
        # An unreadable image is no fault of the engine. The step that needs it reports it.
        if gather_object(unreadable_rows(rows)):
            return
        prompts = engine_and_policy.read_prompts(rows)
        probe = EngineProbe(engine_and_policy, prompts, max_tokens=CHECK_TOKENS)
        checks = probe.check_all()
        if engine_and_policy.accelerator.is_main_process:
            for check in checks:
                # These two compare log-probabilities, on short and on long sequences; their detail
                # is a difference in nats. The third check compares prompts.
                compares_logps = check.name in (AGREEMENT_CHECK, DISTANT_CHECK)
                if compares_logps and check.status is Status.PASSED:
                    tqdm.write(f"Self-check: engine and trainer differ by {check.detail}")
        failed_checks = [check for check in checks if check.status is Status.FAILED]
        if failed_checks:
            raise RolloutError(_refusal_message(failed_checks))


def _refusal_message(failed_checks: list[Check]) -> str:
    """Return the message that says why training does not start, and how to start it anyway."""
    lines = []
    for check in failed_checks:
        remedy = f"{check.remedy[0].upper()}{check.remedy[1:]}"
        lines.append(f"{check.name}: {check.detail}. {remedy}.")
    return (
        f"before the first step: {' '.join(lines)} Nothing would be learned from such rollouts. "
        "`python -m adora_vl.doctor` with the same arguments looks closer; --adora_self_check "
        "false trains all the same."
    )
