"""Image tokens: collapsed in prompts for the engine, checked in its copy, and never sampled."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from transformers import GenerationConfig, PreTrainedTokenizerBase

from adora_vl.data.prompts import PICTURE_TOKENS
from adora_vl.utils.errors import RolloutError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# If the policy sampled one of these tokens, it would have no image, and the training's forward pass
# would raise an error (trl issue 3847).
NEVER_SAMPLED_TOKENS = PICTURE_TOKENS
# Settings of `transformers.generate` that hold for greedy decoding as well as for drawing tokens.
_SETTINGS_OF_ANY_DECODING = {
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "suppress_tokens",
    "cache_implementation",
    "cache_config",
    "use_cache",
    "prefill_chunk_size",
}


class PromptMismatchError(RolloutError):
    """The engine's prompt differs from the trainer's. `row` is its index in the local batch."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def refuse_prefill(dataset: object) -> None:
    """Raise `UserError` for the first row whose prompt ends with a turn of the assistant.

    TRL makes two different prompts of this row. In the engine's prompt it closes the turn and
    begins another one. In the policy's prompt, if the row has images, it leaves the turn open. The
    policy would then learn from answers to another prompt.
    """
    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return
    for number, prompt in enumerate(dataset.select_columns("prompt").with_format(None)["prompt"]):
        if isinstance(prompt, list) and prompt and prompt[-1]["role"] == "assistant":
            raise UserError(
                f"prompt: row {number} ends with a turn of the assistant, and an answer that is "
                "begun cannot be continued here; end it with the user's turn, and ask there how "
                "the answer is to begin"
            )


def never_sampled_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of `NEVER_SAMPLED_TOKENS` that a tokenizer has; a text-only one has none."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in NEVER_SAMPLED_TOKENS if token in vocabulary]


def ban_tokens(ids: Sequence[int], settings: dict[str, Any], config: GenerationConfig) -> None:
    """Keep `transformers.generate` from sampling some tokens.

    Stock TRL bans the image token alone, but the other tokens of pictures have no features either.
    TRL reads bans from two places, so they are added to both.

    Args:
        ids: the banned tokens.
        settings: TRL's `generation_kwargs`.
        config: TRL's generation config.
    """
    banned = sorted({*(settings.get("suppress_tokens") or []), *ids})
    if banned:
        settings["suppress_tokens"] = banned
        config.suppress_tokens = banned


@contextmanager
def ignoring_generation_config(model: "PreTrainedModel") -> Iterator[None]:
    """Make `transformers.generate` ignore the model's `generation_config.json` inside the block.

    Otherwise it would sample with settings of that file wherever the run's config has none. The
    model gets its generation config back afterwards, since it is saved with the model.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    saved_config = base.generation_config
    base.generation_config = GenerationConfig()
    try:
        yield
    finally:
        base.generation_config = saved_config


def greedy_settings(sampling_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which `transformers.generate` takes the likeliest tokens.

    What does not change their probabilities stays: the tokens that end an answer, the banned ones,
    and the settings of the cache.

    `sampling_settings`: those of the run, TRL's `generation_kwargs`.
    """
    settings = {
        name: value
        for name, value in sampling_settings.items()
        if name in _SETTINGS_OF_ANY_DECODING
    }
    settings["do_sample"] = False
    return settings


def collapse_image_runs(ids: Sequence[int], image_token_id: int) -> list[int]:
    """Replace consecutive image tokens by one, which vLLM repeats for each image itself.

    For example, with 9 for the image token, 1 9 9 9 2 1 9 9 2 becomes 1 9 2 1 9 2. The image tokens
    of two images are never neighbours: each image is between a vision-start and a vision-end token.

    Args:
        ids: the token ids of a prompt.
        image_token_id: the id of the image token.
    """
    collapsed: list[int] = []
    for token in ids:
        continues_run = token == image_token_id and collapsed[-1:] == [image_token_id]
        if not continues_run:
            collapsed.append(token)
    return collapsed


def check_prompts(
    trainer_prompts: Sequence[Sequence[int]],
    engine_prompts: Sequence[Sequence[int]],
    image_token_id: int,
) -> None:
    """Raise `PromptMismatchError` for the first prompt that the engine has read otherwise.

    Args:
        trainer_prompts: the token ids of each prompt, as the trainer reads it.
        engine_prompts: the token ids of the same prompts, as the engine has read them.
        image_token_id: the id of the image token, whose number the message compares.
    """
    pairs = zip(trainer_prompts, engine_prompts, strict=True)
    for row, (trainer_ids, engine_ids) in enumerate(pairs):
        if list(trainer_ids) == list(engine_ids):
            continue
        trainer_count = sum(token == image_token_id for token in trainer_ids)
        engine_count = sum(token == image_token_id for token in engine_ids)
        if trainer_count != engine_count:
            why = (
                f"image tokens: trainer {trainer_count}, engine {engine_count}. Give both the same "
                "limits: set min_pixels and max_pixels in the config rather than in one "
                "processor"
            )
        else:
            why = (
                "the text differs: is the tokenizer in the model folder the one that the trainer "
                "uses?"
            )
        raise PromptMismatchError(
            row,
            f"the engine's prompt has {len(engine_ids)} tokens, the trainer's {len(trainer_ids)}; "
            f"{why}",
        )


@contextmanager
def naming_mismatched_row(rows: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Turn a `PromptMismatchError` inside the block into a `RolloutError` that names the row.

    `rows`: the local batch.
    """
    try:
        yield
    except PromptMismatchError as error:
        row = rows[error.row].get("id", f"#{error.row} of this rank's batch")
        raise RolloutError(f"row {row}: {error}") from error
