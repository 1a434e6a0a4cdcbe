"""Saves what policy and reference compute with just before the first step, for `test_precision.py`.

Saved are their constants, and log-probabilities at late positions: as the models are built, with
float32 rotary frequencies, and with rounded ones. A guard refuses the rounded ones. Run under
ZeRO-3.

Usage: precision_run.py FOLDER [training arguments]
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from adora_vl.config.command import parse_command
from adora_vl.models.precision import RefuseWrongBuffers
from adora_vl.utils.errors import RunError

FAR_POSITIONS = (500, 1000, 2000)
TOKENS_PER_POSITION = 50  # tokens up to and with each position


class LookedAtError(Exception):
    """Ends a training that was never meant to begin."""


def constant_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of the model that is not a parameter.

    These are buffers, and plain attributes of its modules.
    """
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                values[f"{prefix}.{name}"] = value.detach().clone()
    return values


def exact_text_frequencies(model: Any) -> Tensor:
    """Return the text's rotary frequencies, (head size / 2,), by RoPE's own formula in float32."""
    config = model.config.get_text_config()
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponents


@torch.no_grad()
def logps_at_far_positions(model: nn.Module) -> dict[str, Tensor]:
    """Return log-probabilities up to each of `FAR_POSITIONS`, by position, (window, vocabulary).

    The windows follow the same random text.
    """
    # ordinary tokens begin before 50
    length = FAR_POSITIONS[-1] + 1
    first = 50
    ids = torch.randint(first, 400, (1, length), generator=torch.Generator().manual_seed(0))
    logits = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=length
    ).logits[0]
    logps = logits.float().log_softmax(dim=-1)
    return {
        str(position): logps[position - TOKENS_PER_POSITION + 1 : position + 1].clone()
        for position in FAR_POSITIONS
    }


class SaveTensorsAtStart(TrainerCallback):
    """Saves what both models compute with at the start of a training, and ends it."""

    def __init__(self, trainer: Any, folder: Path) -> None:
        self.trainer = trainer
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save constants, and log-probabilities as built, with exact and rounded frequencies."""
        reference = self.trainer.accelerator.unwrap_model(self.trainer.ref_model)
        models = {"policy": self.trainer.model, "reference": reference}
        refusals = {"built": self.refusal()}
        tensors: dict[str, Any] = {}
        for role, model in models.items():
            tensors |= {
                f"{role}/constants/{name}": value for name, value in constant_tensors(model).items()
            }
            tensors |= {
                f"{role}/built/{position}": value
                for position, value in logps_at_far_positions(model).items()
            }
            exact = exact_text_frequencies(model)
            for precision, frequencies in (
                ("float32", exact),
                ("rounded", exact.bfloat16()),
            ):
                model.get_decoder().rotary_emb.inv_freq.data = frequencies
                tensors |= {
                    f"{role}/{precision}/{position}": value
                    for position, value in logps_at_far_positions(model).items()
                }
            refusals[role] = self.refusal()
            model.get_decoder().rotary_emb.inv_freq.data = exact
        # DeepSpeed gives each parameter that ZeRO-3 shards a `ds_id`
        sharded = all(hasattr(next(model.parameters()), "ds_id") for model in models.values())
        facts = {"refusals": refusals, "sharded": sharded, "dtype": str(self.trainer.model.dtype)}
        if self.trainer.accelerator.is_main_process:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                self.folder / "tensors.safetensors",
            )
            (self.folder / "facts.json").write_text(json.dumps(facts))
        raise LookedAtError

    def refusal(self) -> str:
        """Return the guard's error of wrong buffers, or an empty string."""
        try:
            RefuseWrongBuffers(self.trainer.models_by_role()).on_train_begin(None, None, None)
        except RunError as error:
            return str(error)
        return ""


def main() -> int:
    """Build a trainer by the arguments of a command, save what its models compute with, and end."""
    from trl import GRPOTrainer

    from adora_vl.prepare import prepare
    from adora_vl.train import build_trainer

    trainer: Any = build_trainer(prepare(parse_command(sys.argv[2:]), "inspect"))
    trainer.callback_handler.callbacks.insert(0, SaveTensorsAtStart(trainer, Path(sys.argv[1])))
    with contextlib.suppress(LookedAtError):
        GRPOTrainer.train(trainer)  # which notes no failure
    trainer.accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
