"""Engine and trainer against each other: same prompts, same log-probabilities, cold, after changes,
after sleep.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from adora_vl.models.families import LANGUAGE_MODEL, component_of, seeing_families
from adora_vl.models.precision import REMEDY, ModelsByRole, wrong_in
from adora_vl.rollout import agreement
from adora_vl.rollout.agreement import (
    COLD,
    DISTANT,
    PIXELS,
    POSITIONS,
    PROMPTS,
    EngineProbe,
)
from adora_vl.rollout.engine_pair import EnginePair, Prompts, SampledRollouts
from adora_vl.rollout.prompt_tokens import never_sampled_ids
from adora_vl.utils.checks import Check, Status, failed, passed, skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_MOVE = 0.1  # nats: a change that moves the policy by less proves nothing

# Names of checks, and below them what to do where one fails.
BUFFERS = "constants are as in float32"
FEATURES = "image tokens equal image features"
LANGUAGE = "agreement, language model changed"
VISION = "agreement, vision changed"
SLEEP = "agreement, after sleep and wake"
BANNED = "banned tokens are never sampled"
RUNNER = "vLLM's model runner"

SYNC = (
    "weights do not reach the engine: check the versions above, LoRA's kind (plain LoRA is merged "
    "for the engine) and vllm_mode; report it with this table"
)
CACHES = (
    "the engine answers with features or prefixes of older weights: both caches have to be reset "
    "on a sync; check the version of vLLM"
)
WAKING = (
    "weights are lost in sleep: try VLLM_USE_V2_MODEL_RUNNER=0 where the table says V2, else set "
    "vllm_enable_sleep_mode: false, and report it with this table"
)
VERSIONS = "check the version of vLLM above"
BANS = (
    "remove logit_bias and allowed_token_ids from generation_kwargs; the bans are set by "
    "adora_vl for every model"
)


SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of the tensor's own size, tried until the policy has moved


def choose_parameter(model: "PreTrainedModel", *, vision: bool) -> tuple[str, Any] | None:
    """Choose the last trained matrix of the language model's layers, or of tower and projector.

    The last one has the most direct effect on the output. With `vision` it is the last one before
    the image embeddings: features that enter at later layers ("deepstack") are added to much larger
    numbers, and hardly move an answer. Returns name and parameter; None if nothing there is
    trained.
    """
    trained = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and len(_shape(parameter)) >= 2
        and (component_of(name) != LANGUAGE_MODEL) == vision
        and (vision or ".layers." in name)
    ]
    projectors = [family.projector[0] for family in seeing_families().values()]
    direct = [
        (name, parameter)
        for name, parameter in trained
        if any(projector in name for projector in projectors)
    ]
    candidates = direct or trained
    return candidates[-1] if candidates else None


def _shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that ZeRO-3 has in parts."""
    # ZeRO-3 leaves a parameter empty between its uses
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def _whole(parameter: Any) -> Iterator[Tensor]:
    """Yield the whole parameter, which ZeRO-3 gathers from all ranks. Collective.

    What rank 0 writes into it inside goes to all ranks.
    """
    if not hasattr(parameter, "ds_tensor"):
        yield parameter.data
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield parameter.data


@contextmanager
def changed(parameter: Any, seed: int = 0) -> Iterator[Callable[[float], None]]:
    """Yield a function that sets a weight to its original plus noise of a given relative size.

    The original is restored in the end.
    """
    with _whole(parameter) as values:
        original = values.detach().to("cpu", copy=True)
    noise = torch.randn(original.shape, generator=torch.Generator().manual_seed(seed))
    size = original.float().square().mean().sqrt()
    # LoRA's second factor starts at zero, which has no size of its own
    step = noise * (size if size > 0 else 1.0 / max(_shape(parameter)) ** 0.5)

    def put(values: Tensor) -> None:
        with _whole(parameter) as weight:
            weight.copy_(values)

    with torch.no_grad():
        try:
            yield lambda scale: put((original.float() + scale * step).to(original.dtype))
        finally:
            put(original)


def check_features(prompts: Prompts, image_token_id: int | None, merge: int) -> Check:
    """Check that each prompt has as many image tokens as its images have features."""
    if image_token_id is None or prompts.images is None:
        return skipped(FEATURES, "no images")
    grids = prompts.fields["image_grid_thw"].prod(dim=-1) // merge**2
    features = [int(part.sum()) for part in torch.split(grids, prompts.num_images)]
    for name, ids, expected in zip(prompts.names, prompts.ids, features, strict=True):
        tokens = ids.count(image_token_id)
        if tokens != expected:
            detail = (
                f"{name}: {tokens} image tokens in the prompt, {expected} features of its images"
            )
            return failed(
                FEATURES, detail, f"the processor expands images in its own way; {PIXELS}"
            )
    return passed(
        FEATURES, f"{min(features)} to {max(features)} per prompt, in {len(features)} prompts"
    )


def check_buffers(models: Mapping[str, nn.Module | None]) -> Check:
    """Check rotary frequencies and whatever else is computed from the config.

    Those of the policy and of the reference model are looked at.
    """
    faults = wrong_in(models)
    if faults:
        return failed(BUFFERS, "; ".join(faults), REMEDY)
    return passed(BUFFERS, "rotary frequencies in float32")


def check_runner(pair: EnginePair) -> Check:
    """Note which of its two model runners vLLM has chosen.

    They compute the same in different code.
    """
    assert pair.engine is not None
    version = pair.engine.model_runner
    alternative = ", VLLM_USE_V2_MODEL_RUNNER=0 chooses V1" if version == "V2" else ""
    return passed(RUNNER, f"{version}{alternative}")


@dataclass
class Examination(EngineProbe):
    """The probe, and what changes weights or sampling for a while; on all ranks together."""

    models: ModelsByRole = field(kw_only=True)

    def after_change(self, *, vision: bool) -> Check:
        """Check that the engine follows a weight that is changed and synced.

        The weight is put back, and synced.
        """
        name, remedy = (VISION, CACHES) if vision else (LANGUAGE, SYNC)
        chosen = choose_parameter(self.pair.policy(), vision=vision)
        if chosen is None:
            why = (
                "there are none"
                if vision and self.prompts.images is None
                else "nothing of it is trained"
            )
            return skipped(name, f"{why}: it cannot change")
        if vision and self.prompts.images is None:
            return skipped(name, "the prompts have no images")
        engine = self.pair.engine
        assert engine is not None
        try:
            moving, parameter = chosen
            with changed(parameter, self.pair.config.seed) as change:
                # the same prompts as before, so that whatever is left of them in a cache would be
                # used
                rollouts = self.sample(name)
                moved = self._move(change, rollouts)
                if moved < LEAST_MOVE:
                    return skipped(
                        name, f"a change of {moving} moves these answers by {moved:.2g} nats only"
                    )
                engine.sync_weights()
                drift = self.compare(name).drift
        finally:
            engine.sync_weights()
        return agreement.check_drift(
            name, drift, self.bound, remedy, f"; the change moved the policy by {moved:.2g}"
        )

    def _move(self, change: Callable[[float], None], rollouts: SampledRollouts) -> float:
        """Change the weight until the policy moves by far more than the bound.

        Returns by how many nats per token.
        """
        before_BC = self.pair.policy_logps(rollouts)
        moved = 0.0
        for scale in SCALES:
            change(scale)
            now_BC = self.pair.policy_logps(rollouts)
            moved = self.pair.drift_over_ranks(now_BC, before_BC, rollouts.mask_BC).mean
            if moved > max(3 * self.bound, LEAST_MOVE):
                break
        return moved

    def after_sleep(self) -> Check:
        """Check that the engine agrees after it has slept.

        TRL puts it to sleep after each generation, which discards its weights; the next generation
        wakes it.
        """
        engine = self.pair.engine
        assert engine is not None
        if not engine.enable_sleep_mode:
            return skipped(SLEEP, "vllm_enable_sleep_mode: false, the engine never sleeps")
        if not engine._llm_weights_sleeping:
            engine.put_to_sleep()
        drift = self.compare("sleep").drift
        return agreement.check_drift(SLEEP, drift, self.bound, WAKING)

    def banned(self) -> Check:
        """Check that the engine never samples a banned token.

        It samples greedily among the banned tokens and the one that the policy finds least likely.
        """
        banned = never_sampled_ids(self.pair.tokenizer)
        if not banned:
            return skipped(BANNED, "this tokenizer has none of them")
        only = [*banned, self._least_likely(banned)]
        rollouts = self.sample("banned", max_tokens=1, temperature=0.0, allowed_token_ids=only)
        chosen = {token for row in rollouts.completion_ids for token in row}
        caught = sorted(chosen & set(banned))
        names = self.pair.tokenizer.convert_ids_to_tokens(caught or banned)
        if caught:
            return failed(BANNED, f"sampled: {', '.join(names)}", BANS)
        return passed(BANNED, ", ".join(names))

    def _least_likely(self, banned: Sequence[int]) -> int:
        """Return the allowed token of the lowest logit after the first prompt."""
        pair = self.pair
        policy = pair.policy()
        first = pair.collate(
            agreement.first_prompts(self.prompts, 1),
            completions=[[]],
            logps=None,
            counts_in_loss=[True],
        )
        columns: dict[str, Any] = {**first}
        fields = {name: columns[name] for name in self.prompts.fields if name in columns}
        fields |= {"input_ids": first["prompt_ids"], "attention_mask": first["prompt_mask"]}
        with torch.no_grad(), pair.accelerator.autocast():
            output = policy(**fields, logits_to_keep=1)
        logits = output.logits[0, -1].float()
        logits[list(banned)] = torch.inf
        logits[len(pair.tokenizer) :] = torch.inf  # rows of the embedding that no token has
        return int(logits.argmin())


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Some checks that are made together."""

    names: tuple[str, ...]
    remedy: str  # for an error that stops them
    run: Callable[[], list[Check]]


def _steps_of(examination: Examination, merge: int) -> list[_Step]:
    """Return the steps of an examination in their order. `merge`: as in `examine`."""
    pair = examination.pair
    image_token = getattr(pair.processor, "image_token_id", None)
    return [
        _Step(
            names=(FEATURES,),
            remedy=PIXELS,
            run=lambda: [check_features(examination.prompts, image_token, merge)],
        ),
        _Step(
            names=(BUFFERS,),
            remedy=REMEDY,
            run=lambda: [check_buffers(examination.models())],
        ),
        _Step(
            names=(RUNNER,),
            remedy=VERSIONS,
            run=lambda: [check_runner(pair)],
        ),
        _Step(
            names=(PROMPTS, COLD),
            remedy=PIXELS,
            run=examination.check_agreement,
        ),
        _Step(
            names=(DISTANT,),
            remedy=POSITIONS,
            run=lambda: [examination.check_distant_agreement()],
        ),
        _Step(
            names=(LANGUAGE,),
            remedy=SYNC,
            run=lambda: [examination.after_change(vision=False)],
        ),
        _Step(
            names=(VISION,),
            remedy=CACHES,
            run=lambda: [examination.after_change(vision=True)],
        ),
        _Step(
            names=(SLEEP,),
            remedy=WAKING,
            run=lambda: [examination.after_sleep()],
        ),
        _Step(
            names=(BANNED,),
            remedy=BANS,
            run=lambda: [examination.banned()],
        ),
    ]


def examine(examination: Examination, merge: int) -> list[Check]:
    """Run every check in order, and return their results.

    `merge`: patches of an image token along a side.

    A check that raises fails, and the rest is skipped, since the engine may be broken. Without a
    colocated engine only those of the trainer are made.
    """
    pair = examination.pair
    unseen = ""
    if pair.engine is None:
        unseen = "use_vllm: false, the policy samples itself"
    elif pair.config.vllm_mode != "colocate":
        unseen = "vllm_mode: server is not examined"
    checks: list[Check] = []
    for step in _steps_of(examination, merge):
        broken = any(check.status is Status.FAILED and check.name == PROMPTS for check in checks)
        broken = broken or any(check.detail.startswith(_RAISED) for check in checks)
        why = "not after the failure above" if broken else ""
        if unseen and step.names not in ((FEATURES,), (BUFFERS,)):
            why = unseen
        if why:
            checks += [skipped(name, why) for name in step.names]
        else:
            checks += agreement.worst_of_all_ranks(_guarded(step))
    return checks


_RAISED = "stopped: "


def _guarded(step: _Step) -> list[Check]:
    """Run the checks of a step; an error fails the first and skips the rest."""
    try:
        return step.run()
    except Exception as error:  # the table is for finding out what fails, whatever it is
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        first, *rest = step.names
        fault = failed(first, f"{_RAISED}{line}", step.remedy)
        return [fault, *(skipped(name, "it stopped before") for name in rest)]


class Examined(Exception):  # noqa: N818  # no error: it ends a training that was never meant to begin
    """Raised when the examination is over."""


class ExamineBeforeStepOne(TrainerCallback):  # type: ignore[misc]  # transformers is untyped to mypy
    """Examines, keeps the lines in `checks`, and leaves `trainer.train()` by raising `Examined`."""

    def __init__(self, pair: EnginePair, models: ModelsByRole, rows: int) -> None:
        """Create the callback; the checks run when the training begins."""
        self.pair = pair
        self.models = models
        self.rows = rows
        self.checks: list[Check] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Run all examinations, and leave the training."""
        pair = self.pair
        prompts = pair.read_prompts(pair.first_rows(self.rows))
        merge = getattr(getattr(pair.processor, "image_processor", None), "merge_size", 1)
        self.checks = examine(Examination(pair, prompts, models=self.models), merge)
        raise Examined
