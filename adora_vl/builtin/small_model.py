"""How every small model is built: stages of training, one loop for all of them, and a folder that
holds a whole model or none.
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
from adora_vl.utils.files import (
    check_folder,
    naming_write_errors,
    read_json_object,
    replacing_folder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin


def init_random_model(
    make: Callable[[], Any], tokenizer: PreTrainedTokenizerBase, seed: int
) -> Any:
    """Build a model, and draw its weight matrices at random from a seed.

    The caller's random state stays as it is. Biases and norms keep their initial values.

    Args:
        make: builds the model.
        tokenizer: the model's generation config gets its tokens for padding and the end of a turn.
        seed: of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "norm" in name:
                continue
            # Wider than the default 0.02, which at this width leaves the first hundreds of steps
            # without a gradient.
            is_embedding = "embed_tokens" in name or "pos_embed" in name
            if is_embedding:
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
    """Train a model in place with AdamW, and return the mean loss of the last 50 steps.

    The learning rate follows torch's `OneCycleLR`. Afterwards the model is in evaluation mode.

    Args:
        model: in float32. Its weights stay so, since the last updates of a cycle are too small for
            bfloat16.
        loss_of: returns the loss of a step by its number, a scalar tensor.
        steps: how many steps.
        learning_rate: the peak of the schedule.
        dtype: in which losses are computed, `float32` or `bfloat16`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
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
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return statistics.fmean(losses[-50:])


@dataclass(frozen=True)
class TrainingStage:
    """Steps of training with one `OneCycleLR` schedule of the learning rate."""

    steps: int
    learning_rate: float  # the peak of the schedule
    loss_of: Callable[[int], Tensor]  # returns the loss of a step by its number, a scalar tensor


@dataclass(frozen=True)
class UntrainedModel:
    """A model before the stages of its training."""

    model: Any  # in float32
    processor: Any  # or its tokenizer
    stages: Sequence[TrainingStage]
    # what is written into `build.json` beside the plan, such as versions
    facts: Mapping[str, object] = field(default_factory=dict)
    dtype: str = "float32"  # in which losses are computed and weights are saved


def train_and_save(
    folder: Path, plan: Any, prepare: Callable[[Any], UntrainedModel], device: str = "cpu"
) -> dict[str, object]:
    """Build a small model by its plan, train it in stages, and save it; return how it was made.

    The same versions and number of threads give the same weights on a CPU. Raises `UserError` where
    `folder` holds anything but a model that was built here.

    Args:
        folder: it appears complete or not at all; `build.json` in it has what is returned.
        plan: a dataclass with the numbers of the training.
        prepare: builds the model and its stages from the plan.
        device: where it is trained.
    """
    check_model_folder(folder)
    untrained = prepare(plan)
    untrained.model.to(device)
    losses = []
    for stage in untrained.stages:
        loss = fit(
            untrained.model,
            loss_of=stage.loss_of,
            steps=stage.steps,
            learning_rate=stage.learning_rate,
            dtype=untrained.dtype,
        )
        losses.append(round(loss, 4))
    saved_model = untrained.model.to("cpu", dtype=getattr(torch, untrained.dtype))
    return save_model_and_facts(
        folder,
        model=saved_model,
        processor=untrained.processor,
        plan=plan,
        final_losses=losses,
        **untrained.facts,
    )


_FACTS_FILE = "build.json"


def check_model_folder(folder: Path) -> None:
    """Raise `UserError` for a folder that must not be replaced by a model.

    It may be absent or empty, or hold a model that was built here, which has a `build.json`.
    """
    check_folder("output", folder.parent)
    with naming_write_errors("output", folder):
        exists = folder.exists()
        if exists and not folder.is_dir():
            raise UserError(f"output: {str(folder)!r} is a file; choose a folder")
        if exists and any(folder.iterdir()) and not (folder / _FACTS_FILE).is_file():
            raise UserError(
                f"output: {str(folder)!r} holds something else than a tiny model; choose another "
                "folder"
            )


def is_built(folder: Path, plan: Mapping[str, object]) -> bool:
    """Return whether `folder` holds a model that was built by this plan.

    `plan`: the numbers of the training by name, such as `{"steps": 1800, "seed": 1}`.
    """
    has_weights = (folder / "model.safetensors").is_file()
    stored_plan = read_json_object(folder / _FACTS_FILE).get("plan")
    # The plan was stored as JSON, in which tuples become lists.
    return has_weights and bool(stored_plan == json.loads(json.dumps(plan)))


def save_model_and_facts(
    folder: Path,
    model: "PreTrainedModel",
    processor: "ProcessorMixin",
    plan: Any,
    **training_facts: object,
) -> dict[str, object]:
    """Save a model, its processor and the facts of how they were made (`build.json`).

    Returns these facts. Raises `UserError` where the folder cannot be written.

    Args:
        folder: an earlier one is replaced when all files are complete.
        model: the model.
        processor: its processor or tokenizer.
        plan: a dataclass with the numbers of the training.
        training_facts: further facts by name.
    """
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        **training_facts,
        "plan": asdict(plan),
    }
    with naming_write_errors("output", folder), replacing_folder(folder) as new_folder:
        model.save_pretrained(new_folder)
        processor.save_pretrained(new_folder)
        (new_folder / _FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n")
    return facts
