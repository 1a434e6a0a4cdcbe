"""Checks of constants that a cast may round: the rotary frequencies.

They compare what a model computes far from the start of a text.

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
from transformers import PreTrainedModel

from adora_vl.models.precision import ROTARY_BUFFER_NAME, describe_wrong_buffers, restore_buffers
from benchmarks.gpu.setting import Setting, float32_copy, process_group, random_token_ids
from benchmarks.gpu.table import CheckLine, at_least_line, at_most_line, verdict_line

WINDOW_TOKENS = 50  # tokens up to each position whose log-probabilities are compared
ROUNDING_SLACK = 1.25  # the same sums in another order


def cast(setting: Setting) -> Iterator[CheckLine]:
    """Check that buffers are restored after `model.to(torch.bfloat16)`, which casts them too."""
    exact = _model(setting)
    subject = copy.deepcopy(exact).float().to(torch.bfloat16)
    restore_buffers(subject)
    yield from buffer_lines(setting, exact, subject, subject)


def zero3(setting: Setting) -> Iterator[CheckLine]:
    """Check the same for a model that DeepSpeed loads in `zero.Init` and prepares for training."""
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
        yield from buffer_lines(setting, exact, engine, sharded)


def buffer_lines(
    setting: Setting, exact: PreTrainedModel, subject: nn.Module, plain: nn.Module
) -> Iterator[CheckLine]:
    """Compare a model with the same weights in float32, and check its rotary frequencies.

    Args:
        setting: the size and the device.
        exact: the bfloat16 model, with constants that no cast has touched.
        subject: the model that is checked; DeepSpeed's engine under ZeRO-3.
        plain: the module that has the buffers of `subject`; without an engine it is `subject`.
    """
    wrong_names = describe_wrong_buffers(plain)
    rotary_dtypes = {
        str(buffer.dtype) for name, buffer in plain.named_buffers() if ROTARY_BUFFER_NAME in name
    }
    figure = ", ".join(sorted(rotary_dtypes)).replace("torch.", "")
    if wrong_names:
        figure = wrong_names[0]
    yield verdict_line(
        "rotary frequencies",
        figure,
        "float32, the config's values",
        not wrong_names and rotary_dtypes == {"torch.float32"},
        "adora_vl.models.precision",
    )
    ends = (500, 2000, 4000) if setting.full else (500, 1000)
    exact_logps = logps_at_distance(setting, float32_copy(exact), ends)
    subject_logps = logps_at_distance(setting, subject, ends)
    untouched_logps = logps_at_distance(setting, exact, ends)
    rounded_logps = logps_at_distance(setting, round_rotary_frequencies(exact), ends)
    for end in ends:
        error = _mean_distance(subject_logps[end], exact_logps[end])
        untouched_error = _mean_distance(untouched_logps[end], exact_logps[end])
        source = f"{ROUNDING_SLACK} times what bfloat16 costs with untouched frequencies"
        yield at_most_line(
            f"from float32 at token {end}",
            value=error,
            bound=ROUNDING_SLACK * untouched_error,
            unit="nats",
            source=source,
        )
    last_end = ends[-1]
    rounded_error = _mean_distance(rounded_logps[last_end], exact_logps[last_end])
    untouched_error = _mean_distance(untouched_logps[last_end], exact_logps[last_end])
    yield at_least_line(
        f"rounded frequencies, seen at token {last_end}",
        value=rounded_error,
        bound=2 * ROUNDING_SLACK * untouched_error,
        unit="nats",
        source="else this check would not notice them",
    )


def round_rotary_frequencies(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model whose rotary frequencies are rounded to bfloat16."""
    rounded_model = copy.deepcopy(model)
    for name, buffer in rounded_model.named_buffers():
        if ROTARY_BUFFER_NAME in name:
            buffer.data = buffer.bfloat16().float()
    return rounded_model


@torch.no_grad()
def logps_at_distance(
    setting: Setting, model: nn.Module, ends: tuple[int, ...]
) -> dict[int, Tensor]:
    """Return a model's log-probabilities in a window of 50 positions before each of `ends`.

    For example, ends (500, 1000) give those at positions 451 to 500 under key 500, and those at 951
    to 1000 under key 1000. Each tensor has the shape (50, vocabulary).
    """
    ids = random_token_ids(
        setting,
        rows=1,
        length=ends[-1] + 1,
        vocabulary=setting.config("3B", layers=1).text_config.vocab_size,
    )
    positions = torch.cat([torch.arange(end - WINDOW_TOKENS + 1, end + 1) for end in ends]).to(
        setting.device
    )
    logits = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        logits_to_keep=positions,
        use_cache=False,
    ).logits[0]
    logps = logits.float().log_softmax(dim=-1).split(WINDOW_TOKENS)
    return dict(zip(ends, logps, strict=True))


def _mean_distance(logps: Tensor, reference: Tensor) -> float:
    """Return the mean absolute difference, computed in float64."""
    return float((logps.double() - reference.double()).abs().mean())


def _model(setting: Setting) -> PreTrainedModel:
    """Return a random model whose attention scores have a standard deviation of about 3.

    A trained model's scores spread as much. Weights of the usual size would give nearly equal
    scores, and a wrong rotary angle would then change nothing.
    """
    model = setting.model(setting.config("3B", layers=4), torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and name.endswith(("q_proj.weight", "k_proj.weight")):
                # Inputs are normalised, so numbers of queries and keys spread by 1.75 each, and
                # scores, which are their products over the root of the head's size, by 1.75² = 3.1.
                parameter.normal_(std=1.75 / parameter.size(1) ** 0.5)
    return model
