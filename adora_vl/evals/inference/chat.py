"""What all engines share: the text of a prompt, pixel limits, token bans, decoding and dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from PIL import Image

from adora_vl.data.prompts import Message
from adora_vl.models.families import (
    KNOWN_FAMILIES_TEXT,
    has_linear_attention,
    position_fault_in_vllm,
    sees_images,
)
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase, ProcessorMixin

    from adora_vl.evals.inference.requests import AnswerEngineSettings

# An upper bound of the tokens that a chat template and the rounding of image sizes add to a prompt.
_MAX_TEMPLATE_TOKENS = 256


def _combine_limits(
    model_limits: Mapping[str, int], user_limits: Mapping[str, int]
) -> dict[str, int]:
    """Return the pixel limits of the user; a limit that the user did not give is the model's.

    Both mappings may have the keys `min_pixels` and `max_pixels`. Raises `UserError` if the user
    gave limits for a model that sees no images, or if the lower limit is over the upper one.
    """
    if user_limits and not model_limits:
        raise UserError("max_pixels: the model sees no images; leave the pixel limits out")
    limits = {**model_limits, **user_limits}
    lower = limits.get("min_pixels", 0)
    upper = limits.get("max_pixels", 0)
    if user_limits and lower > upper:
        raise UserError(
            f"min_pixels: {lower} is over max_pixels, {upper} (what is not given comes from "
            "the model's processor); give both"
        )
    return limits


class ChatProcessor:
    """Turns conversations with images into tokens, and tokens into text, as the model expects it.

    It has the model's own processor and configuration, with the user's pixel limits. `pixel_limits`
    is empty if the user gave none, and otherwise has both `min_pixels` and `max_pixels`: Qwen's
    image processor silently ignores one that is given alone, while vLLM counts image tokens with
    it.
    """

    def __init__(
        self,
        model: str,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        revision: str | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor: ProcessorMixin | PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Load the configuration and the processor of a model.

        Args:
            model: A folder or a hub id.
            min_pixels: The least pixels of an image; None: the model's own limit.
            max_pixels: The most pixels of an image; None: the model's own limit.
            revision: The revision on the hub.
            chat_template_kwargs: Arguments of the chat template.
            processor: A trainer's processor, in place of the model's own.

        Raises `UserError` for a model that cannot be loaded, and for pixel limits that it cannot
        have.
        """
        # Imported here, because scoring loads no model and should not wait for them.
        from adora_vl.models.load import pixel_limits
        from adora_vl.rollout.prompt_tokens import never_sampled_ids

        # It sets `config`, `auto_class`, `text_only`, `processor` and its image processor.
        self._load(model, revision, processor)
        self._chat_template_kwargs = chat_template_kwargs or {}
        model_limits = pixel_limits(self._image_processor)
        if not self.text_only and model_limits is None:
            raise UserError(
                f"model: {model!r} has model_type {self.config.model_type}, whose image processor "
                "has no limits in pixels; serve it and use --engine openai, or name a model of "
                f"the families {KNOWN_FAMILIES_TEXT}"
            )
        user_limits: dict[str, int] = {}
        if min_pixels:
            user_limits["min_pixels"] = min_pixels
        if max_pixels:
            user_limits["max_pixels"] = max_pixels
        self._effective_limits = _combine_limits(model_limits or {}, user_limits)
        self.pixel_limits = self._effective_limits if user_limits else {}
        # A model without images has a tokenizer in place of a processor.
        self.tokenizer: PreTrainedTokenizerBase = (
            self.processor if self.text_only else self.processor.tokenizer
        )
        # The prompts of a batch end together, so that generation begins at one position.
        self.tokenizer.padding_side = "left"
        # Tokens that an answer cannot have, such as the placeholder of an image.
        self.banned_ids: list[int] = never_sampled_ids(self.tokenizer)
        self.pad_id: int = self.tokenizer.pad_token_id
        self.eos_id: int = self.tokenizer.eos_token_id
        # The most tokens of a prompt with its answer.
        self.context_length: int = self.config.get_text_config().max_position_embeddings
        self.image_id: int | None = getattr(self.processor, "image_token_id", None)

    def _load(
        self,
        model: str,
        revision: str | None,
        processor: ProcessorMixin | PreTrainedTokenizerBase | None,
    ) -> None:
        """Load the configuration of a model, and its processor if `processor` is None.

        Raises `UserError` for a model that cannot be loaded.
        """
        from transformers import AutoProcessor, AutoTokenizer

        from adora_vl.models.load import auto_class, read_config
        from adora_vl.utils.hub import load_failure_reason, uses_local_files_only

        is_local = uses_local_files_only(model)
        try:
            self.config: Any = read_config("model", model, revision)
            self.auto_class = auto_class(self.config)
            self.text_only = not sees_images(self.config)
            processor_class: Any = AutoTokenizer if self.text_only else AutoProcessor
            self.processor: Any = processor or processor_class.from_pretrained(
                model, revision=revision, local_files_only=is_local, trust_remote_code=False
            )
            self._image_processor: Any = None if self.text_only else self.processor.image_processor
        except UserError:
            raise  # its message already says what is wrong
        except Exception as error:  # a damaged file raises errors of many kinds
            reason = load_failure_reason(model, error)
            raise UserError(
                f"model: {model!r} cannot be loaded as a (vision-)language model ({reason})"
            ) from error

    @classmethod
    def from_settings(cls, settings: AnswerEngineSettings) -> Self:
        """Load the processor of the model that an engine's settings name."""
        return cls(
            settings.model,
            min_pixels=settings.min_pixels,
            max_pixels=settings.max_pixels,
            revision=settings.revision,
            chat_template_kwargs=settings.chat_template_kwargs,
        )

    def check_vllm(self, model: str, dtype: str) -> None:
        """Raise `UserError` for a model that vLLM cannot run, or computes with another precision.

        Args:
            model: The model's name, for messages.
            dtype: The dtype as the user asked for it, such as `auto`.
        """
        from adora_vl.utils.launch import has_vllm_cpu_build

        fault = position_fault_in_vllm(self.config)
        if fault:
            raise UserError(f"model: {model!r} {fault}")
        is_float32_on_cpu = has_vllm_cpu_build() and self.resolve_dtype(dtype) == "float32"
        if is_float32_on_cpu and has_linear_attention(self.config):
            raise UserError(
                f"model: {model!r} is in float32, and on a CPU vLLM computes its linear attention "
                "in bfloat16 alone; use --engine transformers"
            )

    def render(self, messages: list[Message]) -> str:
        """Render a conversation by the chat template as text, with one placeholder per image.

        Raises `UserError` for images where the model has no vision.
        """
        if self.text_only:
            messages = [
                {**message, "content": _join_text_parts(message["content"])} for message in messages
            ]
        text: str = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **self._chat_template_kwargs
        )
        return text

    def prompt_ids(self, messages: list[Message], images: Sequence[Image.Image]) -> list[int]:
        """Return the token ids of a conversation with images.

        The placeholder P of an image is repeated once for each token of the image: with two tokens
        for the image, the ids 5, P, 7 of the chat template become 5, P, P, 7.
        """
        template_ids: list[int] = self.tokenizer(self.render(messages))["input_ids"]
        image_token_counts = iter([self.image_token_count(image) for image in images])
        prompt_ids: list[int] = []
        for token_id in template_ids:
            repeats = next(image_token_counts) if token_id == self.image_id else 1
            prompt_ids += [token_id] * repeats
        return prompt_ids

    def image_token_count(self, image: Image.Image) -> int:
        """Return the number of tokens of an image, after it is resized within the pixel limits."""
        image_processor = self._image_processor
        width, height = image.size
        patches = image_processor.get_number_of_image_patches(height, width, self.pixel_limits)
        # A square of merge_size x merge_size patches becomes one token.
        return int(patches) // int(image_processor.merge_size) ** 2

    def batch_inputs(self, prompts: Sequence[list[int]], images: Sequence[Any]) -> BatchEncoding:
        """Build the inputs of the model for several prompts.

        Args:
            prompts: The token ids of each prompt. They are padded at the left to (B, T).
            images: The images of all prompts, in their order.
        """
        batch: BatchEncoding = self.tokenizer.pad(
            {"input_ids": list(prompts)}, padding=True, return_tensors="pt"
        )
        if self.image_id is not None:
            # The model computes the position ids of images from this mask.
            batch["mm_token_type_ids"] = (batch["input_ids"] == self.image_id).int()
        batch.update(self._process_images(images))
        return batch

    def prompt_fields(self, prompts: Sequence[list[int]], images: Sequence[Any]) -> dict[str, Any]:
        """Return what the model reads beside the tokens of prompts, by the names of its arguments.

        It is what `batch_inputs` adds to the tokens, without padding: `mm_token_type_ids` has a
        list for each prompt, with 1 at the tokens of images.

        Args:
            prompts: The token ids of each prompt.
            images: The images of all prompts, in their order.
        """
        fields = self._process_images(images)
        if self.image_id is not None:
            fields["mm_token_type_ids"] = [
                [int(token_id == self.image_id) for token_id in prompt_ids]
                for prompt_ids in prompts
            ]
        return fields

    def _process_images(self, images: Sequence[Any]) -> dict[str, Any]:
        """Return the pixels and grids of images within the pixel limits; nothing for no images."""
        if not images:
            return {}
        return dict(
            self._image_processor(images=list(images), return_tensors="pt", **self.pixel_limits)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def resolve_dtype(self, name: str) -> str:
        """Return the name of a dtype; for `auto` it is the dtype in which the model was saved.

        vLLM has an `auto` of its own, which would turn float32 into a dtype of 16 bits.
        """
        if name != "auto":
            return name
        import torch

        saved_dtype = getattr(self.config, "dtype", None)
        if saved_dtype is not None:
            return str(saved_dtype).removeprefix("torch.")
        return "bfloat16" if torch.cuda.is_available() else "float32"

    def resolved_settings(self, dtype: str) -> dict[str, Any]:
        """Return the settings that options such as `dtype: auto` leave to the model.

        For example, `{"dtype": "bfloat16", "min_pixels": 3136, "max_pixels": 401408}`.
        """
        return {"dtype": self.resolve_dtype(dtype), **self._effective_limits}

    def why_too_long(self, prompt_ids: Sequence[int], context_length: int) -> str | None:
        """Say why a prompt leaves no room for an answer in a context of `context_length` tokens.

        Returns None if there is room.
        """
        if len(prompt_ids) < context_length:
            return None
        image_tokens = sum(token_id == self.image_id for token_id in prompt_ids)
        text_tokens = len(prompt_ids) - image_tokens
        if not image_tokens or text_tokens >= context_length:
            return (
                f"its text has {text_tokens} tokens and the model's context {context_length}; "
                "fewer pixels would not help"
            )
        return (
            f"its text has {text_tokens} tokens, its image {image_tokens}, and the model's context "
            f"{context_length}; lower --max-pixels"
        )

    def required_context_length(self, max_images: int, max_text_bytes: int, max_tokens: int) -> int:
        """Return the context length that suffices for any prompt with its answer.

        It is at most the model's own context length.

        Args:
            max_images: The most images of a prompt.
            max_text_bytes: The bytes of the longest text. A byte is at most one token.
            max_tokens: The most tokens of an answer.
        """
        bound = max_text_bytes + _MAX_TEMPLATE_TOKENS + max_tokens
        if not self.text_only:
            # The side of the square of pixels that becomes one token.
            token_side = self._image_processor.patch_size * self._image_processor.merge_size
            # Rounded up, since a part of a square needs a token too.
            tokens_per_image = math.ceil(self._effective_limits["max_pixels"] / token_side**2)
            bound += max_images * tokens_per_image
        return min(self.context_length, int(bound))


def _join_text_parts(content: str | list[Message]) -> str:
    """Join the parts of a message to one text, which templates of models without vision expect.

    Raises `UserError` where a part is an image.
    """
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise UserError(
            "model: it sees no images, and the problems have some; use --no-image where there is "
            "one"
        )
    return "".join(part["text"] for part in content)
