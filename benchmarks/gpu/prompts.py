"""The policy's pass with each prompt once per group, with rows end to end, and with separate rows
as stock TRL has it.

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
from transformers.utils import is_flash_attn_2_available
from trl.trainer.utils import add_fused_lm_head

from adora_vl.packing import packed_forward
from adora_vl.packing.policy_pass import PolicyPass
from adora_vl.utils.files import GIB
from benchmarks.gpu.setting import (
    ON_A_GPU_ONLY,
    Setting,
    apart,
    as_far_as_it_fits,
    gradients,
    in_float32,
    words,
)
from benchmarks.gpu.table import Line, at_most, holds, skipped
from benchmarks.measure import by_turns, peak_bytes

SLACK = 2.0
_VOCABULARY = 32_768  # the LM head has a check of its own
# Prompt, completion, rows. The first one runs in float32 too, at 7B widths in 17 GiB; the others by
# what they take
_EXACT = (512, 256, 4)
_FULL = ((512, 256, 8), (512, 1024, 8), (1024, 2048, 8), (2048, 256, 4), (256, 64, 16))
_SMALL = ((48, 12, 4), (24, 96, 4))


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
        ids = words(setting, rows=rows, length=prompt + completion, vocabulary=vocabulary)
        ids[:, :prompt] = ids[0, :prompt]
        mask = torch.ones_like(ids)
        for row, length in enumerate(
            torch.linspace(completion / 2, completion, rows).int().tolist()
        ):
            mask[row, prompt + length :] = 0
        return cls(ids, mask, completion)


def run(setting: Setting) -> Iterator[Line]:
    for size in ("3B", "7B"):
        yield from as_far_as_it_fits(setting, size, _of_width(setting, size))
    yield from _with_flash_attention(setting)


def _of_width(setting: Setting, size: str) -> Iterator[Line]:
    config = setting.config(size, layers=4 if setting.full else 2, vocabulary=_VOCABULARY)
    lengths = _FULL if setting.full else _SMALL
    subject = Subject(setting, setting.model(config, torch.bfloat16))
    exact = _EXACT if setting.full else lengths[0]
    group = RandomGroup.of(setting, *exact, config.text_config.vocab_size)
    yield from subject.exactness(size, group=group, name="shared", make=subject.shared)
    for prompt, completion, rows in lengths:
        where = f"{size}, prompt {prompt}, {rows} x {completion}"
        groups = [  # a new length in every call, as in training
            RandomGroup.of(setting, prompt + more, completion, rows, config.text_config.vocab_size)
            for more in range(6 if setting.full else 4)
        ]
        yield from as_far_as_it_fits(setting, where, subject.rule(where, groups))
        subject.model.zero_grad(set_to_none=True)


def _with_flash_attention(setting: Setting) -> Iterator[Line]:
    if not (setting.on_gpu and is_flash_attn_2_available()):
        reason = (
            "flash attention is not installed" if setting.on_gpu else "flash attention needs a GPU"
        )
        yield skipped("shared, flash attention", reason)
        return
    config = setting.config("3B", layers=4, vocabulary=_VOCABULARY)
    subject = Subject(setting, setting.model(config, torch.bfloat16, "flash_attention_2"))
    group = RandomGroup.of(setting, *_EXACT, config.text_config.vocab_size)
    yield from subject.exactness(
        "3B, flash attention", group=group, name="shared", make=subject.shared
    )


class Subject:
    """A model, and the ways to its log-probabilities."""

    def __init__(self, setting: Setting, model: Any) -> None:
        self.setting = setting
        self.model = model.train()
        self.accelerator = Accelerator(cpu=not setting.on_gpu)
        add_fused_lm_head(self.model)

    def separate(
        self, model: Any, ids: Tensor, mask: Tensor, completion: int, *_: Any, **__: Any
    ) -> Any:
        """The batch as separate rows, as in stock TRL."""
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-completion] = -100
        logps = model(
            input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True
        ).log_probs
        return logps[:, -completion:], None, None

    def through(self, policy: PolicyPass | None, group: RandomGroup, model: Any = None) -> Tensor:
        """Log-probabilities (B, C); 0 where there is no token."""
        arguments = (
            model if model is not None else self.model,
            group.ids,
            group.mask,
            group.completion,
        )
        logps = (
            policy(self.separate, *arguments) if policy is not None else self.separate(*arguments)
        )[0]
        return logps * group.mask[:, -group.completion :]

    def shared(self) -> PolicyPass:
        switches: Any = SimpleNamespace(uses=lambda part: True)
        return PolicyPass(self.accelerator, switches)

    def exactness(
        self, size: str, group: RandomGroup, name: str, make: Callable[[], PolicyPass]
    ) -> Iterator[Line]:
        """Both ways' distance from float32, and the kernels that they use."""
        reference = in_float32(self.model)
        add_fused_lm_head(reference)
        right = self._both(None, group, reference)
        del reference
        noise = self._both(None, group)
        policy = make()
        with _whatever_the_rule_says():
            results = self._both(policy, group)
        layout = policy.packed_forward
        used = layout.passes > 0
        yield holds(
            f"{size}, {name}",
            "used" if used else layout.refusal or "not used",
            "used",
            used,
            "PackedForward",
        )
        for number, tensor_name in enumerate(("log-probabilities", "gradients")):
            value = apart(results[number], right[number])
            bound = SLACK * apart(noise[number], right[number])
            source = f"{SLACK} times separate rows' own error in bfloat16"
            yield at_most(
                f"{size}, {name}: {tensor_name}, from float32",
                value=value,
                bound=bound,
                unit="",
                source=source,
            )
        for label, way in (("separate", None), (name, policy)):
            with _whatever_the_rule_says():
                kernels = self.kernels(partial(self.through, way, group))
            slow = any("math" in kernel for kernel in kernels)
            yield holds(
                f"{size}, {label}: attention kernel",
                ", ".join(kernels) or "none of PyTorch's",
                "not math",
                not slow,
                "the math kernel holds every pair of tokens in memory",
            )

    def rule(self, where: str, groups: Sequence[RandomGroup]) -> Iterator[Line]:
        """Seconds and peak of both ways, and whether the way that training takes is the faster one.

        `groups`: of nearly one length. Each way sees a new one in every call, as in training.
        """
        policy = self.shared()
        group = groups[0]
        with torch.no_grad():
            self.through(policy, group)
        chosen = "shared" if policy.packed_forward.passes else "separate"
        forced = self.shared()
        ways = {
            name: partial(self._step, way, cycle(groups))
            for name, way in (("separate", None), ("shared", forced))
        }
        with _whatever_the_rule_says():
            times = by_turns(self.setting.device, ways, 3 if self.setting.full else 1)
            peaks = {name: peak_bytes(self.setting.device, way) / GIB for name, way in ways.items()}
        figure = "; ".join(f"{name} {times[name]:.3g} s, {peaks[name]:.2g} GiB" for name in ways)
        if self.setting.on_gpu:
            ratio = times[chosen] / min(times.values())
            line = at_most(
                f"{where}: {chosen}, of the faster way's time",
                value=ratio,
                bound=1.1,
                unit="",
                source=f"a tenth is noise; {figure}",
            )
            yield line
            yield holds(
                f"{where}: both ways",
                figure,
                "shared takes no more memory",
                peaks["shared"] <= 1.05 * peaks["separate"],
                "it computes fewer tokens",
            )
        else:
            yield skipped(f"{where}: the rule says {chosen}", ON_A_GPU_ONLY, figure)

    def kernels(self, run: Callable[[], object]) -> list[str]:
        """PyTorch's attention operations in one pass."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.no_grad(), torch.profiler.profile(activities=activities) as profile:
            run()
        names = {event.key for event in profile.key_averages()}
        prefixes = ("aten::_scaled_dot_product_", "aten::_flash_attention_forward", "flash_attn")
        return sorted(name.removeprefix("aten::_") for name in names if name.startswith(prefixes))

    def _step(self, policy: PolicyPass | None, groups: Iterator[RandomGroup]) -> None:
        self.through(policy, next(groups)).sum().backward()
        self.model.zero_grad(set_to_none=True)

    def _both(
        self, policy: PolicyPass | None, group: RandomGroup, model: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities, and the gradients of a weighted sum of them."""
        logps = self.through(policy, group, model)
        weights = torch.linspace(-1, 1, len(logps), device=logps.device)[:, None]
        (logps * weights).sum().backward()
        return logps.detach(), gradients(model if model is not None else self.model)


def _whatever_the_rule_says() -> AbstractContextManager[Any]:
    """Share prompts also where the rule would choose separate rows."""
    return (
        mock.patch.object(packed_forward, "_packing_pays", lambda *_: True)
        if hasattr(packed_forward, "_packing_pays")
        else nullcontext()
    )
