"""Engine and trainer against each other: same prompts, same log-probabilities, cold, after changes,
after sleep.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.doctor.weight_change import changeable_weight, choose_parameter
from adora_vl.models.precision import CAST_REMEDY as BUFFERS_REMEDY
from adora_vl.models.precision import ModelsByRole, describe_wrong_buffers_by_role
from adora_vl.rollout import agreement
from adora_vl.rollout.agreement import (
    AGREEMENT_CHECK,
    DISTANT_CHECK,
    PIXELS_REMEDY,
    POSITIONS_REMEDY,
    PROMPTS_CHECK,
    EngineProbe,
)
from adora_vl.rollout.engine_and_policy import EngineAndPolicy, NamedPrompts, SampledRollouts
from adora_vl.rollout.importance import drift_over_ranks
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from adora_vl.utils.checks import Check, Status, failed, passed, skipped

# The least change of the policy's log-probabilities by a changed weight, in nats per token. With a
# smaller change nobody would notice that the engine still had the old weight.
MIN_POLICY_CHANGE = 0.1

# Names of checks, and below them what to do where one fails.
BUFFERS_CHECK = "constants are as in float32"
FEATURES_CHECK = "image tokens equal image features"
LANGUAGE_CHECK = "agreement, language model changed"
VISION_CHECK = "agreement, vision changed"
SLEEP_CHECK = "agreement, after sleep and wake"
BANNED_CHECK = "banned tokens are never sampled"
RUNNER_CHECK = "vLLM's model runner"

SYNC_REMEDY = (
    "weights do not reach the engine: check the versions above, LoRA's kind (plain LoRA is merged "
    "for the engine) and vllm_mode; report it with this table"
)
CACHES_REMEDY = (
    "the engine answers with features or prefixes of older weights: both caches have to be reset "
    "on a sync; check the version of vLLM"
)
SLEEP_REMEDY = (
    "weights are lost in sleep: try VLLM_USE_V2_MODEL_RUNNER=0 where the table says V2, else set "
    "vllm_enable_sleep_mode: false, and report it with this table"
)
VERSION_REMEDY = "check the version of vLLM above"
BAN_REMEDY = (
    "remove logit_bias and allowed_token_ids from generation_kwargs; the bans are set by "
    "adora_vl for every model"
)


# Sizes of the noise that is added to a weight, relative to the weight's own; tried in this order
# until the policy has changed enough.
NOISE_SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)


def check_features(prompts: NamedPrompts, image_token_id: int | None, merge_size: int) -> Check:
    """Check that each prompt has as many image tokens as its images have features.

    The vision tower makes the features. For example, an image of 1 x 16 x 24 patches with
    `merge_size` 2 has 16 * 24 / 4 = 96 features.

    Args:
        prompts: Tokenized prompts with the processor's fields for their images.
        image_token_id: The token that stands for a feature in a prompt; None: the model has none.
        merge_size: As in the image processor: how many patches along a side become one feature.
    """
    if image_token_id is None or prompts.images is None:
        return skipped(FEATURES_CHECK, "no images")
    # Each image has time x height x width patches.
    features_per_image = prompts.fields["image_grid_thw"].prod(dim=-1) // merge_size**2
    image_counts_by_prompt = torch.split(features_per_image, prompts.num_images)
    features_per_prompt = [int(counts.sum()) for counts in image_counts_by_prompt]
    for name, ids, features in zip(
        prompts.row_names, prompts.ids, features_per_prompt, strict=True
    ):
        tokens = ids.count(image_token_id)
        if tokens != features:
            return failed(
                FEATURES_CHECK,
                f"{name}: {tokens} image tokens in the prompt, {features} features of its images",
                f"the processor expands images in its own way; {PIXELS_REMEDY}",
            )
    smallest_count = min(features_per_prompt)
    largest_count = max(features_per_prompt)
    return passed(
        FEATURES_CHECK,
        f"{smallest_count} to {largest_count} per prompt, in {len(features_per_prompt)} prompts",
    )


def check_buffers(models: ModelsByRole) -> Check:
    """Check that rotary frequencies and other constants of the models have float32 precision.

    A model that is built in bfloat16 may have rounded them. `models`: policy and reference model by
    name; None for one that the run does not have.
    """
    faults = describe_wrong_buffers_by_role(models)
    if faults:
        return failed(BUFFERS_CHECK, "; ".join(faults), BUFFERS_REMEDY)
    return passed(BUFFERS_CHECK, "rotary frequencies in float32")


def check_runner(engine_and_policy: EngineAndPolicy) -> Check:
    """Return a check that never fails: it says which of its two model runners vLLM has chosen.

    The two compute the same by different code, so a user who knows the other one can try it.
    """
    assert engine_and_policy.engine is not None
    version = engine_and_policy.engine.model_runner
    alternative = ", VLLM_USE_V2_MODEL_RUNNER=0 chooses V1" if version == "V2" else ""
    return passed(RUNNER_CHECK, f"{version}{alternative}")


@dataclass
class EngineChecker(EngineProbe):
    """Compares the log-probabilities of engine and trainer.

    It does so also after a weight was changed, and after the engine has slept. Collective: all
    ranks call every method together. `models`: the policy and the reference model.
    """

    models: ModelsByRole = field(kw_only=True)

    def check_after_change(self, *, vision: bool) -> Check:
        """Check that the engine agrees with the policy after a weight was changed and synced.

        `vision`: whether the weight is one of the vision tower or projector, and not of the
        language model. In the end it has its old value again, in the engine too.
        """
        check_name = VISION_CHECK if vision else LANGUAGE_CHECK
        remedy = CACHES_REMEDY if vision else SYNC_REMEDY
        lacks_images = vision and self.prompts.images is None
        weight = choose_parameter(self.engine_and_policy.policy, vision=vision)
        if weight is None:
            reason = "there are none" if lacks_images else "nothing of it is trained"
            return skipped(check_name, f"{reason}: it cannot change")
        if lacks_images:
            return skipped(check_name, "the prompts have no images")
        seed = self.engine_and_policy.config.seed
        engine = self.engine_and_policy.engine
        assert engine is not None
        try:
            with changeable_weight(weight.parameter, seed) as set_noise:
                # The same prompts are sampled before and after the change, so that features or
                # prefixes that are still in the engine's caches would be used.
                rollouts = self.sample(check_name)
                policy_change = self._change_policy(set_noise, rollouts)
                if policy_change < MIN_POLICY_CHANGE:
                    return skipped(
                        check_name,
                        f"a change of {weight.name} moves these answers by {policy_change:.2g} "
                        "nats only",
                    )
                engine.sync_weights()
                drift = self.compare(check_name)
        finally:
            engine.sync_weights()
        return agreement.check_drift(
            check_name,
            drift=drift,
            bound=self.bound,
            remedy=remedy,
            note=f"; the change moved the policy by {policy_change:.2g}",
        )

    def _change_policy(
        self, set_noise: Callable[[float], None], rollouts: SampledRollouts
    ) -> float:
        """Add more and more noise to a weight, until the policy's log-probabilities change clearly.

        `set_noise` replaces the weight by its old value plus noise of a scale. Returns by how much
        the policy's log-probabilities of `rollouts` (B rollouts of up to C tokens) have changed, as
        a mean in nats per token.
        """
        logps_before_BC = self.engine_and_policy.policy_logps(rollouts)
        policy_change = 0.0
        for scale in NOISE_SCALES:
            set_noise(scale)
            logps_BC = self.engine_and_policy.policy_logps(rollouts)
            policy_change = drift_over_ranks(
                self.engine_and_policy.accelerator, logps_BC, logps_before_BC, rollouts.mask_BC
            ).mean
            if policy_change > max(3 * self.bound, MIN_POLICY_CHANGE):
                break
        return policy_change

    def check_after_sleep(self) -> Check:
        """Check that the engine agrees with the policy after it has slept.

        In a run TRL puts it to sleep after each generation, which discards its weights. Sampling
        wakes it.
        """
        engine = self.engine_and_policy.engine
        assert engine is not None
        if not engine.enable_sleep_mode:
            return skipped(SLEEP_CHECK, "vllm_enable_sleep_mode: false, the engine never sleeps")
        # TRL's own attribute
        if not engine._llm_weights_sleeping:
            engine.put_to_sleep()
        drift = self.compare("sleep")
        return agreement.check_drift(
            SLEEP_CHECK, drift=drift, bound=self.bound, remedy=SLEEP_REMEDY
        )

    def check_banned_tokens(self) -> Check:
        """Check that the engine never samples a token that is banned, such as one for images.

        The engine may choose only among the banned tokens and one other token, which is the one
        that the policy finds least likely. It samples greedily. So it chooses this token only if
        the ban works; without the ban it would nearly always choose a banned one.
        """
        banned_ids = never_sampled_ids(self.engine_and_policy.tokenizer)
        if not banned_ids:
            return skipped(BANNED_CHECK, "this tokenizer has none of them")
        allowed_ids = [*banned_ids, self._least_likely_token(banned_ids)]
        rollouts = self.sample(
            "banned", max_tokens=1, temperature=0.0, allowed_token_ids=allowed_ids
        )
        sampled_ids = {token for row in rollouts.completion_ids for token in row}
        wrong_ids = sorted(sampled_ids & set(banned_ids))
        tokenizer = self.engine_and_policy.tokenizer
        if wrong_ids:
            names = tokenizer.convert_ids_to_tokens(wrong_ids)
            return failed(BANNED_CHECK, f"sampled: {', '.join(names)}", BAN_REMEDY)
        return passed(BANNED_CHECK, ", ".join(tokenizer.convert_ids_to_tokens(banned_ids)))

    def _least_likely_token(self, banned_ids: Sequence[int]) -> int:
        """Return the token that the policy finds least likely after the first prompt.

        `banned_ids`: tokens that are not considered.
        """
        engine_and_policy = self.engine_and_policy
        policy = engine_and_policy.policy
        batch = engine_and_policy.collate(
            agreement.first_prompts(self.prompts, count=1),
            completions=[[]],
            logps=None,
            counts_in_loss=[True],
        )
        columns: dict[str, Any] = {**batch}
        image_inputs = {name: columns[name] for name in self.prompts.fields if name in columns}
        with torch.no_grad(), engine_and_policy.accelerator.autocast():
            output = policy(
                **image_inputs,
                input_ids=batch["prompt_ids"],
                attention_mask=batch["prompt_mask"],
                logits_to_keep=1,
            )
        logits = output.logits[0, -1].float()
        logits[list(banned_ids)] = torch.inf
        # The embedding may have more rows than the tokenizer has tokens.
        logits[len(engine_and_policy.tokenizer) :] = torch.inf
        return int(logits.argmin())


@dataclass(frozen=True, kw_only=True)
class _CheckGroup:
    """Checks of engine and trainer that one function makes together."""

    names: tuple[str, ...]  # of the checks, as in the table
    remedy: str  # what to do if an exception ends them
    run: Callable[[], list[Check]]  # makes the checks
    needs_engine: bool = True


def _check_groups(checker: EngineChecker, merge_size: int) -> list[_CheckGroup]:
    """Return the checks of engine and trainer in groups that run together, in their order.

    `merge_size`: how many patches along a side become one image token.
    """
    engine_and_policy = checker.engine_and_policy
    image_token = getattr(engine_and_policy.processor, "image_token_id", None)
    return [
        _CheckGroup(
            names=(FEATURES_CHECK,),
            remedy=PIXELS_REMEDY,
            needs_engine=False,
            run=lambda: [check_features(checker.prompts, image_token, merge_size)],
        ),
        _CheckGroup(
            names=(BUFFERS_CHECK,),
            remedy=BUFFERS_REMEDY,
            needs_engine=False,
            run=lambda: [check_buffers(checker.models)],
        ),
        _CheckGroup(
            names=(RUNNER_CHECK,),
            remedy=VERSION_REMEDY,
            run=lambda: [check_runner(engine_and_policy)],
        ),
        _CheckGroup(
            names=(PROMPTS_CHECK, AGREEMENT_CHECK),
            remedy=PIXELS_REMEDY,
            run=checker.check_agreement,
        ),
        _CheckGroup(
            names=(DISTANT_CHECK,),
            remedy=POSITIONS_REMEDY,
            run=lambda: [checker.check_distant_agreement()],
        ),
        _CheckGroup(
            names=(LANGUAGE_CHECK,),
            remedy=SYNC_REMEDY,
            run=lambda: [checker.check_after_change(vision=False)],
        ),
        _CheckGroup(
            names=(VISION_CHECK,),
            remedy=CACHES_REMEDY,
            run=lambda: [checker.check_after_change(vision=True)],
        ),
        _CheckGroup(
            names=(SLEEP_CHECK,),
            remedy=SLEEP_REMEDY,
            run=lambda: [checker.check_after_sleep()],
        ),
        _CheckGroup(
            names=(BANNED_CHECK,),
            remedy=BAN_REMEDY,
            run=lambda: [checker.check_banned_tokens()],
        ),
    ]


def run_engine_checks(checker: EngineChecker, merge_size: int) -> list[Check]:
    """Make the checks of engine and trainer in their order, and return their results.

    The remaining checks are skipped once an exception has ended a check, or once the prompts of
    engine and trainer differ, since the engine may be broken. Without an engine in this process
    only image features and buffers are checked, which need none.

    `merge_size`: how many patches along a side become one image token.
    """
    engine_and_policy = checker.engine_and_policy
    reason_without_engine = ""
    if engine_and_policy.engine is None:
        reason_without_engine = "use_vllm: false, the policy samples itself"
    elif engine_and_policy.config.vllm_mode != "colocate":
        reason_without_engine = "vllm_mode: server is not examined"
    checks: list[Check] = []
    for group in _check_groups(checker, merge_size):
        skip_reason = ""
        if reason_without_engine and group.needs_engine:
            skip_reason = reason_without_engine
        elif any(_may_have_broken_engine(check) for check in checks):
            skip_reason = "not after the failure above"
        if skip_reason:
            checks += [skipped(name, skip_reason) for name in group.names]
        else:
            checks += agreement.worst_of_all_ranks(_run_group(group))
    return checks


# The beginning of a check's detail if an exception has ended it.
_STOPPED_PREFIX = "stopped: "


def _may_have_broken_engine(check: Check) -> bool:
    """Return whether the checks after this one are skipped, since the engine may be broken.

    That is so if the prompts of engine and trainer differ, or if an exception ended the check.
    """
    prompts_differ = check.status is Status.FAILED and check.name == PROMPTS_CHECK
    return prompts_differ or check.detail.startswith(_STOPPED_PREFIX)


def _run_group(group: _CheckGroup) -> list[Check]:
    """Make the checks of a group; on an exception the first one fails, and the rest is skipped."""
    try:
        return group.run()
    except Exception as error:  # whatever it is: the doctor is there to name what fails
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        first_name, *remaining_names = group.names
        failure = failed(first_name, f"{_STOPPED_PREFIX}{line}", group.remedy)
        return [failure, *(skipped(name, "it stopped before") for name in remaining_names)]


# It is no error: it ends a training that was never meant to begin.
class ChecksFinished(Exception):  # noqa: N818
    """Raised when all checks have been made."""


# Transformers is untyped to mypy.
class EngineChecksCallback(TrainerCallback):  # type: ignore[misc]
    """Compares engine and trainer when a training begins, and ends the training.

    It raises `ChecksFinished` to end it. The results are then in `checks`.
    """

    def __init__(
        self, engine_and_policy: EngineAndPolicy, models: ModelsByRole, row_count: int
    ) -> None:
        """Create the callback; the checks run when the training begins.

        Args:
            engine_and_policy: The engine and the policy.
            models: The policy and the reference model.
            row_count: How many rows of the data set each rank makes prompts of.
        """
        self.engine_and_policy = engine_and_policy
        self.models = models
        self.row_count = row_count
        self.checks: list[Check] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make all checks, and end the training."""
        engine_and_policy = self.engine_and_policy
        prompts = engine_and_policy.read_prompts(engine_and_policy.first_rows(self.row_count))
        # A model without vision has no image processor.
        image_processor = getattr(engine_and_policy.processor, "image_processor", None)
        merge_size = getattr(image_processor, "merge_size", 1)
        checker = EngineChecker(
            engine_and_policy=engine_and_policy, prompts=prompts, models=self.models
        )
        self.checks = run_engine_checks(checker, merge_size)
        raise ChecksFinished
