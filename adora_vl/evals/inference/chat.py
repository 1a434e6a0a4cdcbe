"""What all engines have in common, in one place: prompt text, pixel limits, token bans, decoding,
dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from PIL import Image

from adora_vl.data.prompts import Message
from adora_vl.models.families import KNOWN, has_linear_attention, misplaced_by_vllm, sees_images
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import BatchEncoding

    from adora_vl.evals.inference.requests import AnswerEngineSettings

# more than any chat template and the rounding of image sizes add to a prompt
_TEMPLATE_TOKENS = 256


class ChatProcessor:
    """The model's own processor and configuration, with the user's pixel limits.

    Raises `UserError`.

    `pixel_limits` is empty if the user gave none, and otherwise holds both: Qwen's image processor
    silently ignores a `min_pixels` or `max_pixels` that is given alone, while vLLM counts image
    tokens with it.
    """

    def __init__(
        self,
        model: str,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        revision: str | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        processor: Any = None,
    ) -> None:
        """`template`: arguments of the chat template.

        `processor`: in place of the model's own, a trainer's.
        """
        # Imported here, because scoring loads no model and should not wait for them.
        from transformers import AutoProcessor, AutoTokenizer

        from adora_vl.models.load import auto_class, pixel_limits, read_config
        from adora_vl.rollout.prompt_tokens import never_sampled_ids
        from adora_vl.utils.hub import only_here, why_missing

        here = only_here(model)
        try:
            self.config: Any = read_config("model", model, revision)
            self.auto_class = auto_class(self.config)
            self.text_only = not sees_images(self.config)
            kind: Any = AutoTokenizer if self.text_only else AutoProcessor
            self.processor: Any = processor or kind.from_pretrained(
                model, revision=revision, local_files_only=here, trust_remote_code=False
            )
            self._image_processor: Any = None if self.text_only else self.processor.image_processor
        except UserError:
            raise
        except Exception as error:  # a damaged file raises errors of many kinds
            reason = why_missing(model, error)
            raise UserError(
                f"model: {model!r} cannot be loaded as a (vision-)language model ({reason})"
            ) from error
        self._template = template or {}
        own = pixel_limits(self._image_processor)
        if not self.text_only and own is None:
            raise UserError(
                f"model: {model!r} has model_type {self.config.model_type}, whose image processor "
                "has no limits in pixels; serve it and use --engine openai, or name a model of "
                f"the families {KNOWN}"
            )
        given = {
            name: value
            for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels))
            if value
        }
        if given and not own:
            raise UserError("max_pixels: the model sees no images; leave the pixel limits out")
        self._limits: dict[str, int] = {**(own or {}), **given}
        self.pixel_limits = self._limits if given else {}
        least, most = (self._limits.get(name, 0) for name in ("min_pixels", "max_pixels"))
        over = (
            f"min_pixels: {least} is over max_pixels, {most} (what is not given comes from the "
            "model's processor)"
        )
        if given and least > most:
            raise UserError(f"{over}; give both")
        self._tokenizer = self.processor if self.text_only else self.processor.tokenizer
        self._tokenizer.padding_side = "left"
        self.banned_ids: list[int] = never_sampled_ids(self._tokenizer)
        self.pad_id: int = self._tokenizer.pad_token_id
        self.context: int = self.config.get_text_config().max_position_embeddings
        self.image_id: int | None = getattr(self.processor, "image_token_id", None)

    @classmethod
    def of(cls, settings: AnswerEngineSettings) -> Self:
        limits = settings.min_pixels, settings.max_pixels
        return cls(settings.model, *limits, settings.revision, template=settings.template)

    def check_vllm(self, model: str, dtype: str) -> None:
        """Raise `UserError` for a model that vLLM cannot run, or computes otherwise.

        `dtype`: as the user asked for.
        """
        from adora_vl.utils.launch import find_cpu_build

        problem = misplaced_by_vllm(self.config)
        if problem:
            raise UserError(f"model: {model!r} {problem}")
        if (
            find_cpu_build()
            and self.dtype(dtype) == "float32"
            and has_linear_attention(self.config)
        ):
            alone = "on a CPU vLLM computes its linear attention in bfloat16 alone"
            raise UserError(
                f"model: {model!r} is in float32, and {alone}; use --engine transformers"
            )

    def render(self, messages: list[Message]) -> str:
        """The prompt as text, a placeholder per image.

        Raises `UserError` for images where the model has no vision.
        """
        if self.text_only:
            messages = [
                {**message, "content": _text_of(message["content"])} for message in messages
            ]
        asked = {"add_generation_prompt": True, "tokenize": False, **self._template}
        text: str = self.processor.apply_chat_template(messages, **asked)
        return text

    def ids_of(self, messages: list[Message], images: Sequence[Image.Image]) -> list[int]:
        """The prompt's tokens, as many image tokens for each placeholder as the model sees of its
        image.
        """
        found: list[int] = self._tokenizer(self.render(messages))["input_ids"]
        ids = list[int]()
        counts = iter([self.tokens_of(image) for image in images])
        for token in found:
            ids += [token] * (next(counts) if token == self.image_id else 1)
        return ids

    def tokens_of(self, image: Image.Image) -> int:
        """The number of its image tokens."""
        known = self._image_processor
        (width, height) = image.size
        return (
            int(known.get_number_of_image_patches(height, width, self.pixel_limits))
            // int(known.merge_size) ** 2
        )

    def inputs(self, prompts: Sequence[list[int]], images: Sequence[Any]) -> BatchEncoding:
        """Left-padded model inputs of tokens, and of all their images in order.

        The model needs `mm_token_type_ids`.
        """
        made: BatchEncoding = self._tokenizer.pad(
            {"input_ids": list(prompts)}, padding=True, return_tensors="pt"
        )
        if self.image_id is not None:
            made["mm_token_type_ids"] = (made["input_ids"] == self.image_id).int()
        if images:
            made.update(
                self._image_processor(images=list(images), return_tensors="pt", **self.pixel_limits)
            )
        return made

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def dtype(self, name: str) -> str:
        """`name`, or for `auto` the dtype in which the model was saved. vLLM's `auto` would make
        float32 16 bits.
        """
        if name != "auto":
            return name
        import torch

        own = getattr(self.config, "dtype", None)
        fallback = "bfloat16" if torch.cuda.is_available() else "float32"
        return str(own).removeprefix("torch.") if own is not None else fallback

    def resolved(self, dtype: str) -> dict[str, Any]:
        """The dtype and the pixel limits that are used, with the model's own values where the user
        gave none.
        """
        return {"dtype": self.dtype(dtype), **self._limits}

    def overlong(self, ids: Sequence[int], context: int) -> str | None:
        """Why a prompt leaves no room for an answer in a context of so many tokens; None where it
        does.
        """
        if len(ids) < context:
            return None
        of_images = sum(token == self.image_id for token in ids)
        of_text = len(ids) - of_images
        if not of_images or of_text >= context:
            return (
                f"its text has {of_text} tokens and the model's context {context}; fewer pixels "
                "would not help"
            )
        lengths = (
            f"its text has {of_text} tokens, its image {of_images}, and the model's context "
            f"{context}"
        )
        return f"{lengths}; lower --max-pixels"

    def context_needed(self, max_images: int, max_text_bytes: int, max_tokens: int) -> int:
        """A bound on the tokens of prompt and answer, at most the model's context.

        A byte is at most one token.
        """
        most = max_text_bytes + _TEMPLATE_TOKENS + max_tokens
        if not self.text_only:
            # pixels, of a token's side
            unit = self._image_processor.patch_size * self._image_processor.merge_size
            most += max_images * -(-self._limits["max_pixels"] // unit**2)
        return min(self.context, int(most))


def _text_of(content: str | list[Message]) -> str:
    """The content of a message as one text, as the templates of language models without vision
    expect it.
    """
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise UserError(
            "model: it sees no images, and the problems have some; use --no-image where there is "
            "one"
        )
    return "".join(part["text"] for part in content)
