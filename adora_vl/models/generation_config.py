"""The generation config of a model, which has to be one that Transformers saves.

Transformers loads a config with a temperature and without `do_sample`, as many fine-tuned models
have it, but refuses to save it: a run would end at its first checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adora_vl.utils.errors import UserError
from adora_vl.utils.hub import uses_local_files_only

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


def check_generation_config(name: str, revision: str | None) -> None:
    """Raise `UserError` for a model whose generation config could not be saved in a checkpoint.

    Args:
        name: the folder or hub id of the model, which may have no such config.
        revision: of the hub id.
    """
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(
            name, revision=revision, local_files_only=uses_local_files_only(name)
        )
        _allow_sampling_settings(config)
        config.validate(strict=True)
    except OSError:  # the model has none
        return
    except ValueError as error:
        lines = str(error).splitlines()
        # Faults of settings that do not fit each other have a line each, behind a line without any.
        faults = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
        fault = (faults or lines)[0]
        raise UserError(
            f"model_name_or_path: generation_config.json of {name!r} could not be saved in a "
            f"checkpoint ({fault:.300}); correct it"
        ) from error


def repair_generation_config(model: PreTrainedModel) -> None:
    """Let the generation config of a loaded model be saved, if sampling settings forbid it.

    Training and evaluation do not sample by it. Whoever serves the model does, with the same
    settings as before.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "generation_config", None)
    if config is not None:
        _allow_sampling_settings(config)


def _allow_sampling_settings(config: GenerationConfig) -> None:
    """Set `do_sample` in a config whose sampling settings, such as top_k, forbid to save it.

    They would have to be removed otherwise, and vLLM reads them.
    """
    if config.do_sample is True:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
