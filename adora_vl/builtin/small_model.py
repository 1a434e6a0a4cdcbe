"""How every small model is built.

A start says what is taught in which lessons, one loop teaches it, and a folder holds a whole model
or none.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from adora_vl.utils.errors import UserError
from adora_vl.utils.files import check_folder, read_object, replacing_folder, written_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin


def fresh_model(make: Callable[[], Any], tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """Return what `make` makes, its matrices drawn from the seed.

    The caller's random state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "norm" in name:
                continue
            # Wider than the default 0.02, which at this width leaves the first hundreds of steps
            # without a gradient.
            looked_up = "embed_tokens" in name or "pos_embed" in name
            if looked_up:
                std = 0.05
            elif "patch_embed" in name:
                std = 0.03
            else:
                std = 0.5 / parameter[0].numel() ** 0.5
            torch.nn.init.normal_(parameter, std=std)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def fit(
    model: "PreTrainedModel",
    loss_of: Callable[[int], Tensor],
    steps: int,
    learning_rate: float,
    dtype: str = "float32",
) -> float:
    """Train in place on `loss_of(step)`, a scalar, with AdamW and one cycle of the rate.

    Afterwards the model is in evaluation mode. `dtype`: in which losses are computed; the weights
    stay in float32, since the last updates of a cycle are too small for bfloat16. Returns the mean
    loss of the last 50 steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1
    )
    mixed_precision = torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    model.train()
    losses: list[float] = []
    for step in tqdm(range(steps), desc="warm start", disable=not sys.stderr.isatty()):
        with mixed_precision:
            loss = loss_of(step)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return statistics.fmean(losses[-50:])


@dataclass(frozen=True)
class Lesson:
    """Steps of one training with one cycle of the learning rate. `loss_of(step)` is a scalar."""

    steps: int
    learning_rate: float
    loss_of: Callable[[int], Tensor]


@dataclass(frozen=True)
class Untaught:
    """A model before its lessons, with the processor or tokenizer that belongs to it.

    `dtype`: in which lessons are computed and weights are saved; the model itself is in float32.
    """

    model: Any
    processor: Any
    lessons: Sequence[Lesson]
    facts: Mapping[str, object] = field(default_factory=dict)  # beside the plan, for `build.json`
    dtype: str = "float32"


def build_start(
    folder: Path, plan: Any, begin: Callable[[Any], Untaught], device: str = "cpu"
) -> dict[str, object]:
    """Begin a model by its plan, a dataclass, teach it its lessons in order, and save it.

    Returns and saves (`build.json`) how it was made. `folder` appears complete or not at all. The
    same versions and number of threads give the same weights on a CPU. `device`: where the lessons
    are taught. Raises `UserError` where `folder` holds anything else.
    """
    check_place(folder)
    untaught = begin(plan)
    untaught.model.to(device)
    losses = []
    for lesson in untaught.lessons:
        loss = fit(
            untaught.model,
            loss_of=lesson.loss_of,
            steps=lesson.steps,
            learning_rate=lesson.learning_rate,
            dtype=untaught.dtype,
        )
        losses.append(round(loss, 4))
    saved_model = untaught.model.to("cpu", dtype=getattr(torch, untaught.dtype))
    return save_built(
        folder,
        model=saved_model,
        processor=untaught.processor,
        plan=plan,
        final_losses=losses,
        **untaught.facts,
    )


_FACTS = "build.json"


def check_place(folder: Path) -> None:
    """Raise `UserError` unless `folder` is absent, empty or a model that was built here."""
    check_folder("output", folder.parent)
    with written_to("output", folder):
        exists = folder.exists()
        if exists and not folder.is_dir():
            raise UserError(f"output: {str(folder)!r} is a file; choose a folder")
        if exists and any(folder.iterdir()) and not (folder / _FACTS).is_file():
            raise UserError(
                f"output: {str(folder)!r} holds something else than a tiny model; choose another "
                "folder"
            )


def is_built(folder: Path, plan: Mapping[str, object]) -> bool:
    """Return whether `folder` holds a model that was built by this `plan`, compared as JSON."""
    built = read_object(folder / _FACTS).get("plan")
    return (folder / "model.safetensors").is_file() and bool(built == json.loads(json.dumps(plan)))


def save_built(
    folder: Path,
    model: "PreTrainedModel",
    processor: "ProcessorMixin",
    plan: Any,
    **training_facts: object,
) -> dict[str, object]:
    """Save a model, its processor and the facts of how both were made (`build.json`).

    The facts are returned: the number of parameters, `plan`, a dataclass, and `training_facts`. An
    earlier `folder` is replaced when all files are complete. Raises `UserError` where it cannot be
    written.
    """
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **training_facts,
        "plan": asdict(plan),
    }
    with written_to("output", folder), replacing_folder(folder) as new_folder:
        model.save_pretrained(new_folder)
        processor.save_pretrained(new_folder)
        (new_folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n")
    return facts
