"""Compares the policy's pass with each prompt once per group with that of separate rows.

Stock TRL has separate rows.

Language models of 3B's and 7B's widths with few layers. Shared prompts go through `PolicyPass`, as
in a training step, so its own rule says whether they are worth it; the check times both and says
whether the rule was right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available
from trl.trainer.utils import add_fused_lm_head

from adora_vl.packing import packed_forward
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import (
    JUDGED_ON_GPU_ONLY,
    Setting,
    float32_copy,
    lines_while_memory_lasts,
    random_token_ids,
    relative_distance,
    take_gradients,
)
from benchmarks.gpu.table import CheckLine, at_most_line, skipped_line, verdict_line
from benchmarks.measure import median_seconds_by_turns, peak_bytes

ROUNDING_SLACK = 2.0
_VOCABULARY_SIZE = 32_768  # the LM head has a check of its own
# Prompt, completion, rows. The first one runs in float32 too, at 7B widths in 17 GiB; the others by
# what they take
_EXACT_LENGTHS = (512, 256, 4)
_FULL_LENGTHS = ((512, 256, 8), (512, 1024, 8), (1024, 2048, 8), (2048, 256, 4), (256, 64, 16))
_SMALL_LENGTHS = ((48, 12, 4), (24, 96, 4))


@dataclass(frozen=True)
class RandomGroup:
    """One prompt and `rows` completions of different lengths, padded as TRL pads them."""

    ids: Tensor
    mask: Tensor
    completion: int

    @classmethod
    def of(
        cls, setting: Setting, prompt: int, completion: int, rows: int, vocabulary: int
    ) -> RandomGroup:
        """Make a group of random tokens, whose completions have from half of `completion` to all.

        All rows begin with the prompt of the first one. What lies behind the end of a completion is
        masked.
        """
        ids = random_token_ids(
            setting, rows=rows, length=prompt + completion, vocabulary=vocabulary
        )
        ids[:, :prompt] = ids[0, :prompt]
        mask = torch.ones_like(ids)
        for row, length in enumerate(
            torch.linspace(completion / 2, completion, rows).int().tolist()
        ):
            mask[row, prompt + length :] = 0
        return cls(ids, mask, completion)


def run(setting: Setting) -> Iterator[CheckLine]:
    """Compare both ways at the widths of 3B and 7B, and with flash attention where it is there."""
    for size in ("3B", "7B"):
        yield from lines_while_memory_lasts(setting, size, _width_lines(setting, size))
    yield from _flash_attention_lines(setting)


def _width_lines(setting: Setting, size: str) -> Iterator[CheckLine]:
    """Compare both ways on a model of one width, at several lengths."""
    config = setting.config(size, layers=4 if setting.full else 2, vocabulary=_VOCABULARY_SIZE)
    lengths = _FULL_LENGTHS if setting.full else _SMALL_LENGTHS
    subject = Subject(setting, setting.model(config, torch.bfloat16))
    exact = _EXACT_LENGTHS if setting.full else lengths[0]
    group = RandomGroup.of(setting, *exact, config.text_config.vocab_size)
    yield from subject.exactness_lines(size, group=group, name="shared", make=subject.shared)
    for prompt, completion, rows in lengths:
        where = f"{size}, prompt {prompt}, {rows} x {completion}"
        groups = [  # a new length in every call, as in training
            RandomGroup.of(
                setting, prompt + extra_tokens, completion, rows, config.text_config.vocab_size
            )
            for extra_tokens in range(6 if setting.full else 4)
        ]
        yield from lines_while_memory_lasts(setting, where, subject.rule_lines(where, groups))
        subject.model.zero_grad(set_to_none=True)


def _flash_attention_lines(setting: Setting) -> Iterator[CheckLine]:
    """Compare shared prompts with separate rows under flash attention."""
    if not (setting.on_gpu and is_flash_attn_2_available()):
        reason = (
            "flash attention is not installed" if setting.on_gpu else "flash attention needs a GPU"
        )
        yield skipped_line("shared, flash attention", reason)
        return
    config = setting.config("3B", layers=4, vocabulary=_VOCABULARY_SIZE)
    subject = Subject(setting, setting.model(config, torch.bfloat16, "flash_attention_2"))
    group = RandomGroup.of(setting, *_EXACT_LENGTHS, config.text_config.vocab_size)
    yield from subject.exactness_lines(
        "3B, flash attention", group=group, name="shared", make=subject.shared
    )


class Subject:
    """A model, and the ways to its log-probabilities."""

    def __init__(self, setting: Setting, model: PreTrainedModel) -> None:
        self.setting = setting
        self.model = model.train()
        self.accelerator = Accelerator(cpu=not setting.on_gpu)
        add_fused_lm_head(self.model)

    def separate(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        mask: Tensor,
        completion: int,
        *_: object,
        **__: object,
    ) -> tuple[Tensor, None, None]:
        """Compute log-probabilities of the batch as separate rows, as stock TRL does.

        The signature and the two None (entropies and auxiliary loss) are those of TRL's method, in
        whose place `PolicyPass` calls this one.
        """
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-completion] = -100
        logps = model(
            input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
        ).log_probs
        return logps[:, -completion:], None, None

    def logps_through(
        self,
        policy: PolicyPass | None,
        group: RandomGroup,
        model: PreTrainedModel | None = None,
    ) -> Tensor:
        """Return log-probabilities (B, C) through `policy`, or of separate rows; 0 for padding."""
        arguments = (
            model if model is not None else self.model,
            group.ids,
            group.mask,
            group.completion,
        )
        logps = (policy(*arguments) if policy is not None else self.separate(*arguments))[0]
        return logps * group.mask[:, -group.completion :]

    def shared(self) -> PolicyPass:
        """Return a policy pass that shares prompts."""
        switches: Any = SimpleNamespace(uses=lambda part: True)
        return PolicyPass(
            self.separate,
            self.accelerator,
            switches,
            may_have_images=False,
            checkpointing_context=lambda size: nullcontext(),
        )

    def exactness_lines(
        self, size: str, group: RandomGroup, name: str, make: Callable[[], PolicyPass]
    ) -> Iterator[CheckLine]:
        """Compare both ways with float32, and name the attention kernels that they use.

        Separate rows in bfloat16 have rounding errors too. Shared prompts may have twice as much.

        Args:
            size: the model, for the titles of the lines.
            group: the rows that both ways compute.
            name: the other way than separate rows, for the titles.
            make: makes the policy pass of that way.
        """
        reference = float32_copy(self.model)
        add_fused_lm_head(reference)
        exact = self._logps_and_gradients(None, group, reference)
        del reference
        separate = self._logps_and_gradients(None, group)
        policy = make()
        with _sharing_forced():
            results = self._logps_and_gradients(policy, group)
        layout = policy.packed_forward
        is_used = layout.pass_count > 0
        yield verdict_line(
            f"{size}, {name}",
            "used" if is_used else layout.disabled_reason or "not used",
            "used",
            is_used,
            "PackedForward",
        )
        for number, tensor_name in enumerate(("log-probabilities", "gradients")):
            value = relative_distance(results[number], exact[number])
            bound = ROUNDING_SLACK * relative_distance(separate[number], exact[number])
            source = f"{ROUNDING_SLACK} times separate rows' own error in bfloat16"
            yield at_most_line(
                f"{size}, {name}: {tensor_name}, from float32",
                value=value,
                bound=bound,
                unit="",
                source=source,
            )
        for label, way in (("separate", None), (name, policy)):
            with _sharing_forced():
                kernels = self.attention_kernels(partial(self.logps_through, way, group))
            is_slow = any("math" in kernel for kernel in kernels)
            yield verdict_line(
                f"{size}, {label}: attention kernel",
                ", ".join(kernels) or "none of PyTorch's",
                "not math",
                not is_slow,
                "the math kernel holds every pair of tokens in memory",
            )

    def rule_lines(self, where: str, groups: Sequence[RandomGroup]) -> Iterator[CheckLine]:
        """Seconds and peak of both ways, and whether the way that training takes is the faster one.

        `groups`: of nearly one length. Each way sees a new one in every call, as in training.
        """
        policy = self.shared()
        group = groups[0]
        with torch.no_grad():
            self.logps_through(policy, group)
        chosen = "shared" if policy.packed_forward.pass_count else "separate"
        forced = self.shared()
        ways = {
            name: partial(self._run_step, way, cycle(groups))
            for name, way in (("separate", None), ("shared", forced))
        }
        with _sharing_forced():
            times = median_seconds_by_turns(
                self.setting.device, ways, 3 if self.setting.full else 1
            )
            peaks = {name: peak_bytes(self.setting.device, way) / GIB for name, way in ways.items()}
        figure = "; ".join(f"{name} {times[name]:.3g} s, {peaks[name]:.2g} GiB" for name in ways)
        if self.setting.on_gpu:
            ratio = times[chosen] / min(times.values())
            line = at_most_line(
                f"{where}: {chosen}, of the faster way's time",
                value=ratio,
                bound=1.1,
                unit="",
                source=f"a tenth is noise; {figure}",
            )
            yield line
            yield verdict_line(
                f"{where}: both ways",
                figure,
                "shared takes no more memory",
                peaks["shared"] <= 1.05 * peaks["separate"],
                "it computes fewer tokens",
            )
        else:
            yield skipped_line(f"{where}: the rule says {chosen}", JUDGED_ON_GPU_ONLY, figure)

    def attention_kernels(self, run: Callable[[], object]) -> list[str]:
        """Return the names of PyTorch's attention operations in one pass."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
            run()
        names = {event.key for event in profile.key_averages()}
        prefixes = ("aten::_scaled_dot_product_", "aten::_flash_attention_forward", "flash_attn")
        return sorted(name.removeprefix("aten::_") for name in names if name.startswith(prefixes))

    def _run_step(self, policy: PolicyPass | None, groups: Iterator[RandomGroup]) -> None:
        """Take a forward and a backward pass on the next group."""
        self.logps_through(policy, next(groups)).sum().backward()
        self.model.zero_grad(set_to_none=True)

    def _logps_and_gradients(
        self,
        policy: PolicyPass | None,
        group: RandomGroup,
        model: PreTrainedModel | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, and the gradients of a weighted sum of them."""
        logps = self.logps_through(policy, group, model)
        weights = torch.linspace(-1, 1, len(logps), device=logps.device)[:, None]
        (logps * weights).sum().backward()
        return logps.detach(), take_gradients(model if model is not None else self.model)


def _sharing_forced() -> AbstractContextManager[Any]:
    """Share prompts inside the block, also where the rule would choose separate rows."""
    return mock.patch.object(packed_forward, "_is_worth_packing", lambda *_: True)
