"""Constants that a cast may round: the rotary frequencies, and what a model computes far from the
start.

The bound is the same bfloat16 weights in a model whose constants no cast has touched, against
float32. That the check can see rounded constants is a line of its own: the same model with them
must be beyond the bound.
"""

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adora_vl.models.precision import ROTARY, restore_buffers, wrong_buffers
from benchmarks.gpu.setting import Setting, in_float32, process_group, words
from benchmarks.gpu.table import Line, at_least, at_most, holds

WINDOW = 50  # tokens up to each place
SLACK = 1.25  # the same sums in another order


def cast(setting: Setting) -> Iterator[Line]:
    """Whether buffers are restored after `model.to(torch.bfloat16)`, which casts them too."""
    exact = _model(setting)
    subject = copy.deepcopy(exact).float().to(torch.bfloat16)
    restore_buffers(subject)
    yield from judge(setting, exact, subject, subject)


def zero3(setting: Setting) -> Iterator[Line]:
    """The same for a model that DeepSpeed loads under `zero.Init` and prepares, as in training."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    exact = _model(setting)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    with process_group(setting), tempfile.TemporaryDirectory() as folder:
        exact.save_pretrained(folder)
        # Transformers looks for this object while it is alive
        deepspeed_config = HfDeepSpeedConfig(settings)
        sharded = type(exact).from_pretrained(
            Path(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        restore_buffers(sharded)
        engine = deepspeed.initialize(model=sharded, config=settings)[0]
        del deepspeed_config
        engine.eval()
        yield from judge(setting, exact, engine, sharded)


def judge(setting: Setting, exact: Any, subject: Any, plain: nn.Module) -> Iterator[Line]:
    """`subject` computes with `plain`'s buffers; `exact` is the bfloat16 model that nothing was
    done to.
    """
    wrong = wrong_buffers(plain)
    rotary = {str(buffer.dtype) for name, buffer in plain.named_buffers() if ROTARY in name}
    figure = ", ".join(sorted(rotary)).replace("torch.", "") if not wrong else wrong[0]
    yield holds(
        "rotary frequencies",
        figure,
        "float32, the config's values",
        not wrong and rotary == {"torch.float32"},
        "adora_vl.models.precision",
    )
    ends = (500, 2000, 4000) if setting.full else (500, 1000)
    right = far_logps(setting, in_float32(exact), ends)
    ours = far_logps(setting, subject, ends)
    control = far_logps(setting, exact, ends)
    coarse = far_logps(setting, with_rounded(exact), ends)
    for end in ends:
        gap, noise = (_gap(found[end], right[end]) for found in (ours, control))
        source = f"{SLACK} times what bfloat16 costs with untouched frequencies"
        yield at_most(
            f"from float32 at token {end}",
            value=gap,
            bound=SLACK * noise,
            unit="nats",
            source=source,
        )
    rounded_gap = _gap(coarse[ends[-1]], right[ends[-1]])
    noise = _gap(control[ends[-1]], right[ends[-1]])
    yield at_least(
        f"rounded frequencies, seen at token {ends[-1]}",
        value=rounded_gap,
        bound=2 * SLACK * noise,
        unit="nats",
        source="else this check would not notice them",
    )


def with_rounded(model: Any) -> Any:
    """A copy whose rotary frequencies went through bfloat16."""
    rounded_model = copy.deepcopy(model)
    for name, buffer in rounded_model.named_buffers():
        if ROTARY in name:
            buffer.data = buffer.bfloat16().float()
    return rounded_model


@torch.no_grad()
def far_logps(setting: Setting, model: Any, ends: tuple[int, ...]) -> dict[int, Tensor]:
    """Log-probabilities of all tokens, (window, vocabulary), up to each of `ends`."""
    ids = words(
        setting,
        rows=1,
        length=ends[-1] + 1,
        vocabulary=setting.config("3B", layers=1).text_config.vocab_size,
    )
    positions = torch.cat([torch.arange(end - WINDOW + 1, end + 1) for end in ends]).to(
        setting.device
    )
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        logits_to_keep=positions,
        use_cache=False,
    ).logits[0]
    logps = logits.float().log_softmax(dim=-1).split(WINDOW)
    return dict(zip(ends, logps, strict=True))


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().mean())


def _model(setting: Setting) -> Any:
    """Queries and keys are scaled so that the scores of attention spread by about 3, as in a
    trained model: nearly flat attention would not notice an angle.
    """
    model = setting.model(setting.config("3B", layers=4), torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.normal_(std=1.75 / parameter.size(1) ** 0.5)
    return model
