"""Engine and trainer against each other: same prompts, same log-probabilities, cold, after changes, after sleep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from adora_vl.doctor.change import SCALES, Change, changed, choose_parameter
from adora_vl.doctor.distant import far_prompts, head
from adora_vl.doctor.probe import Prompts, Rollouts, agreement_bound, difference, distant_bound, sample, score
from adora_vl.doctor.result import Check, Status, failed, is_healthy, passed, skipped
from adora_vl.errors import RolloutError
from adora_vl.models.precision import REMEDY, wrong_in
from adora_vl.rollout.drift import Drift
from adora_vl.rollout.tokens import PromptMismatchError, never_sampled_ids

TOKENS = 24  # of a probing rollout
LEAST_MOVE = 0.1  # nats: a change that moves the policy by less proves nothing

BUFFERS = "constants are as in float32"
PROMPTS = "engine reads the trainer's prompts"
FEATURES = "image tokens equal image features"
COLD = "agreement, cold"
DISTANT = "agreement, far from the start"
LANGUAGE = "agreement, language model changed"
VISION = "agreement, vision changed"
SLEEP = "agreement, after sleep and wake"
BANNED = "banned tokens are never sampled"

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
SYNC = (
    "weights do not reach the engine: check the versions above, LoRA's kind (plain LoRA is merged for the engine) and "
    "vllm_mode; report it with this table"
)
CACHES = (
    "the engine answers with features or prefixes of older weights: both caches have to be reset on a sync; check the "
    "version of vLLM"
)
WAKING = "weights are lost in sleep: set vllm_enable_sleep_mode: false, and report it with this table"
BANS = "remove logit_bias and allowed_token_ids from generation_kwargs; the bans are set by adora_vl for every model"


class OtherRankError(RolloutError):
    """Another rank has failed; this one has nothing to compare with."""


def check_features(prompts: Prompts, image_token_id: int | None, merge: int) -> Check:
    """As many image tokens in each prompt as the processor has made features for its images."""
    if image_token_id is None or prompts.num_images is None:
        return skipped(FEATURES, "no images")
    grids = prompts.fields["image_grid_thw"].prod(dim=-1) // merge**2
    features = [int(part.sum()) for part in torch.split(grids, prompts.num_images)]
    for name, ids, wanted in zip(prompts.names, prompts.ids, features, strict=True):
        tokens = ids.count(image_token_id)
        if tokens != wanted:
            detail = f"{name}: {tokens} image tokens in the prompt, {wanted} features of its images"
            return failed(FEATURES, detail, f"the processor expands images in its own way; {PIXELS}")
    return passed(FEATURES, f"{min(features)} to {max(features)} per prompt, in {len(features)} prompts")


def check_read_prompts(prompts: Prompts, rollouts: Rollouts, image_token_id: int | None) -> Check:
    """The ids that the engine has read, token by token."""
    for name, ours, theirs in zip(prompts.names, prompts.ids, rollouts.prompt_ids, strict=True):
        if ours != theirs:
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


def check_buffers(trainer: Any) -> Check:
    """Rotary frequencies and whatever else is computed from the config, in policy and reference."""
    wrong = wrong_in(trainer)
    return failed(BUFFERS, "; ".join(wrong), REMEDY) if wrong else passed(BUFFERS, "rotary frequencies in float32")


@dataclass
class Examination:
    """One trainer with its engine, and the prompts that it is examined with; on all ranks together."""

    trainer: Any
    prompts: Prompts
    tokens: int = TOKENS

    @property
    def bound(self) -> float:
        return agreement_bound(self.trainer)

    def sampled(self, where: str, tokens: int | None = None, prompts: Prompts | None = None) -> Rollouts:
        """Rollouts of these prompts (None: the examination's own), or an error on every rank where one has an error:
        none waits for another one for ever.
        """
        problem: Exception | None = None
        rollouts: Rollouts | None = None
        try:
            rollouts = sample(self.trainer, prompts or self.prompts, tokens=tokens or self.tokens, where=where)
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
        """Of the engine as it is, on these prompts (None: the examination's own)."""
        rollouts = self.sampled(where, prompts=prompts)
        logps_BC = score(self.trainer, prompts or self.prompts, rollouts)
        return difference(self.trainer, logps_BC, rollouts.logps_BC, rollouts.mask_BC), rollouts, logps_BC

    def cold(self) -> list[Check]:
        """Prompts and log-probabilities with the weights as they are."""
        self.trainer.vllm_generation.sync_weights()
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
        """The same on every rank, near and far: a failure on any of them is everybody's."""
        checks = _worst_of_all_ranks(self.cold())
        return [*checks, *_worst_of_all_ranks([self.distant()])] if is_healthy(checks) else checks

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

    def after_change(self, *, vision: bool) -> Check:
        """A weight is changed and synced: the engine has to follow. The weight is put back, and synced."""
        name, remedy = (VISION, CACHES) if vision else (LANGUAGE, SYNC)
        chosen = choose_parameter(self.trainer.model, vision=vision)
        if chosen is None:
            why = "there are none" if vision and self.prompts.num_images is None else "nothing of it is trained"
            return skipped(name, f"{why}: it cannot change")
        if vision and self.prompts.num_images is None:
            return skipped(name, "the prompts have no images")
        generation = self.trainer.vllm_generation
        try:
            with changed(*chosen, seed=self.trainer.args.seed) as change:
                # the same prompts as before, so that whatever is left of them in a cache would be used
                rollouts = self.sampled(name)
                moved = self._move(change, rollouts)
                if moved < LEAST_MOVE:
                    return skipped(name, f"a change of {change.name} moves these answers by {moved:.2g} nats only")
                generation.sync_weights()
                drift, _, _ = self.drift(name)
        finally:
            generation.sync_weights()
        return judge(name, drift, self.bound, remedy, f"; the change moved the policy by {moved:.2g}")

    def _move(self, change: Change, rollouts: Rollouts) -> float:
        """Change the weight until the policy moves by far more than the bound. Returns by how many nats per token."""
        before_BC = score(self.trainer, self.prompts, rollouts)
        moved = 0.0
        for scale in SCALES:
            change.scale(scale)
            now_BC = score(self.trainer, self.prompts, rollouts)
            moved = difference(self.trainer, now_BC, before_BC, rollouts.mask_BC).mean
            if moved > max(3 * self.bound, LEAST_MOVE):
                break
        return moved

    def after_sleep(self) -> Check:
        """TRL puts the engine to sleep after each generation, which discards its weights; the next wakes it."""
        generation = self.trainer.vllm_generation
        if not generation.enable_sleep_mode:
            return skipped(SLEEP, "vllm_enable_sleep_mode: false, the engine never sleeps")
        if not generation._llm_weights_sleeping:
            generation.put_to_sleep()
        drift, _, _ = self.drift("sleep")
        return judge(SLEEP, drift, self.bound, WAKING)

    def banned(self) -> Check:
        """The engine may choose, greedily, between the banned tokens and the one that the policy likes least."""
        banned = never_sampled_ids(self.trainer._tokenizer)
        if not banned:
            return skipped(BANNED, "this tokenizer has none of them")
        generation = self.trainer.vllm_generation
        with generation.sampling(temperature=0.0, allowed_token_ids=[*banned, self._least_likely(banned)]):
            rollouts = self.sampled("banned", tokens=1)
        chosen = {token for row in rollouts.completion_ids for token in row}
        caught = sorted(chosen & set(banned))
        names = self.trainer._tokenizer.convert_ids_to_tokens(caught or banned)
        if caught:
            return failed(BANNED, f"sampled: {', '.join(names)}", BANS)
        return passed(BANNED, ", ".join(names))

    def _least_likely(self, banned: Sequence[int]) -> int:
        """The allowed token of the lowest logit after the first prompt."""
        trainer = self.trainer
        first = head(self.prompts, 1)
        ids = torch.tensor(first.ids, device=trainer.accelerator.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            output = trainer.model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=1, **first.fields)
        logits = output.logits[0, -1].float()
        logits[list(banned)] = torch.inf
        logits[len(trainer._tokenizer) :] = torch.inf  # rows of the embedding that no token has
        return int(logits.argmin())


def examine(examination: Examination, merge: int) -> list[Check]:
    """Every engine check in order; one that raises fails, and the rest is skipped, since the engine may be broken."""
    trainer = examination.trainer
    if not trainer.use_vllm or trainer.vllm_mode != "colocate":
        why = "vllm_mode: server is not examined" if trainer.use_vllm else "use_vllm: false, the policy samples itself"
        features = check_features(examination.prompts, _image_token(trainer), merge)
        unseen = (PROMPTS, COLD, DISTANT, LANGUAGE, VISION, SLEEP, BANNED)
        return [features, check_buffers(trainer), *(skipped(name, why) for name in unseen)]
    steps: list[tuple[tuple[str, ...], Callable[[], list[Check]]]] = [
        ((FEATURES,), lambda: [check_features(examination.prompts, _image_token(trainer), merge)]),
        ((BUFFERS,), lambda: [check_buffers(trainer)]),
        ((PROMPTS, COLD), examination.cold),
        ((DISTANT,), lambda: [examination.distant()]),
        ((LANGUAGE,), lambda: [examination.after_change(vision=False)]),
        ((VISION,), lambda: [examination.after_change(vision=True)]),
        ((SLEEP,), lambda: [examination.after_sleep()]),
        ((BANNED,), lambda: [examination.banned()]),
    ]
    checks: list[Check] = []
    for names, step in steps:
        broken = any(check.status is Status.FAILED and check.name == PROMPTS for check in checks)
        if broken or any(check.detail.startswith(_RAISED) for check in checks):
            checks += [skipped(name, "not after the failure above") for name in names]
            continue
        checks += _worst_of_all_ranks(_guarded(names, step))
    return checks


_RAISED = "stopped: "
_REMEDIES = {
    BUFFERS: REMEDY, FEATURES: PIXELS, PROMPTS: PIXELS, DISTANT: POSITIONS, LANGUAGE: SYNC, VISION: CACHES,
    SLEEP: WAKING, BANNED: BANS,
}  # fmt: skip


def _guarded(names: Sequence[str], step: Callable[[], list[Check]]) -> list[Check]:
    try:
        return step()
    except Exception as error:  # the table is for finding out what fails, whatever it is
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        first, *rest = names
        return [
            failed(first, f"{_RAISED}{line}", _REMEDIES[first]),
            *(skipped(name, "it stopped before") for name in rest),
        ]


def _worst_of_all_ranks(checks: list[Check]) -> list[Check]:
    """A failure on any rank is everybody's."""
    order = list(Status)
    return [
        max(column, key=lambda check: order.index(check.status))
        for column in zip(*gather_object([checks]), strict=True)
    ]


def _image_token(trainer: Any) -> int | None:
    return getattr(trainer.processing_class, "image_token_id", None)
