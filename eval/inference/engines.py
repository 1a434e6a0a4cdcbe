"""The engines that generate answers, vLLM and Transformers. Both get the same prompt, pixels and token bans.

A third one, `eval.inference.endpoint`, asks a server.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import Reply
from eval.inference.chat import ChatProcessor
from eval.inference.endpoint import EndpointEngine, endpoint_of
from eval.inference.requests import HUB_ID, AnswerEngine, AnswerEngineSettings, AnswerRequest, EngineName, Unanswerable

if TYPE_CHECKING:
    from vllm.config.model import ModelDType


def default_engine() -> EngineName:
    """vLLM if it is installed, otherwise Transformers."""
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def check_model(model: str) -> str:
    """The absolute path of a model folder, or a hub id unchanged. Also accepts `tiny` and the folder of a LoRA run.

    Raises `UserError` for anything else.
    """
    from adora_vl.models.load import local_model

    model = local_model(model)
    folder = Path(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"model: the folder {model!r} has no config.json; give a folder made by save_pretrained")
        return str(folder.resolve())
    # `runs/tyni` has the form of a hub id too, but if there is a folder `runs` it is rather a mistyped path.
    if not HUB_ID.fullmatch(model) or folder.parent.is_dir():
        raise UserError(f"model: {model!r} is neither a folder here nor a hub id of the form owner/name")
    return model


def settings_of(options: Namespace) -> AnswerEngineSettings:
    """The engine that the options of a command ask for. Raises `UserError`."""
    if options.min_pixels and options.max_pixels and options.min_pixels > options.max_pixels:
        raise UserError(f"min_pixels: {options.min_pixels} is over max_pixels, {options.max_pixels}; lower it")
    endpoint = endpoint_of(options)
    model = check_model(options.model) if endpoint is None else options.model
    given = {each.name: vars(options)[each.name] for each in fields(AnswerEngineSettings) if each.name in options}
    return AnswerEngineSettings(**{**given, "model": model, "endpoint": endpoint})


def check_loadable(settings: AnswerEngineSettings) -> None:
    """Raise `UserError` for a model folder that cannot be loaded, before anything is written or asked."""
    from adora_vl.models.load import check_weights

    if settings.endpoint is None and Path(settings.model).is_dir():
        check_weights("model", settings.model)
        chat = ChatProcessor(settings.model, settings.min_pixels, settings.max_pixels, settings.revision)
        if settings.engine == "vllm":
            chat.check_vllm(settings.model, settings.dtype)


def build_engine(settings: AnswerEngineSettings) -> AnswerEngine:
    """Load the model into the engine that `settings` name. Raises `UserError` if the model cannot be loaded."""
    if settings.engine == "openai":
        return EndpointEngine(settings)
    return VLLMEngine.start(settings) if settings.engine == "vllm" else TransformersEngine(settings)


def answered(
    chat: ChatProcessor, requests: Sequence[AnswerRequest], generate: Callable[[Sequence[AnswerRequest]], list[Reply]]
) -> list[Reply | Unanswerable]:
    """What `generate` answers to those of the requests that fit the model's context."""
    faults = [chat.overlong(request.messages, request.images, chat.context) for request in requests]
    fitting = [request for request, fault in zip(requests, faults, strict=True) if fault is None]
    replies = iter(generate(fitting) if fitting else [])
    return [next(replies) if fault is None else Unanswerable(fault) for fault in faults]


class VLLMEngine:
    """vLLM in this process. Prompts have one placeholder per image, because vLLM itself expands placeholders.

    `llm` is a `vllm.LLM`, created by `start` or lent by a trainer.
    """

    def __init__(self, chat: ChatProcessor, llm: Any, *, max_tokens: int, temperature: float, batch_size: int) -> None:
        from vllm import SamplingParams

        self.batch_size = batch_size
        self._chat, self._llm, self._params = chat, llm, SamplingParams
        self.resolved: dict[str, Any] = {}
        self._sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "logit_bias": dict.fromkeys(chat.banned_ids, -100.0),
            "detokenize": False,  # decoded here, as for the other engine
        }

    @classmethod
    def start(cls, settings: AnswerEngineSettings) -> VLLMEngine:
        """Load the model into a new vLLM engine. Raises `UserError` if vLLM is not installed, or would compute this
        model differently from Transformers.
        """
        if importlib.util.find_spec("vllm") is None:
            raise UserError("engine: vllm is not installed; install it or use --engine transformers")
        from adora_vl.rollout.engine_settings import engine_is_eager, prefill_options
        from adora_vl.utils.launch import prepare_engine_environment

        prepare_engine_environment()  # before the import: vLLM reads its environment there
        import torch
        from vllm import LLM

        chat = ChatProcessor(settings.model, settings.min_pixels, settings.max_pixels, settings.revision)
        chat.check_vllm(settings.model, settings.dtype)
        longest = chat.context_needed(settings.max_images, settings.max_text_bytes, settings.max_tokens)
        llm = LLM(
            model=settings.model,
            revision=settings.revision,
            dtype=cast("ModelDType", chat.dtype(settings.dtype)),
            max_model_len=longest,
            # On a CPU this is a share of the memory of the whole machine.
            gpu_memory_utilization=0.9 if torch.cuda.is_available() else 0.3,
            enforce_eager=engine_is_eager(),
            **prefill_options(longest, 4096),
            limit_mm_per_prompt=None if chat.text_only else {"image": max(settings.max_images, 1), "video": 0},
            mm_processor_kwargs=chat.pixel_limits or None,
            seed=settings.seed,
        )
        batch_size, temperature = settings.batch_size or 256, settings.temperature
        engine = cls(chat, llm, max_tokens=settings.max_tokens, temperature=temperature, batch_size=batch_size)
        engine.resolved = chat.resolved(settings.dtype)
        return engine

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply | Unanswerable]:
        return answered(self._chat, requests, self._generate)

    def _generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        prompts: list[dict[str, Any]] = []
        for request in requests:
            prompt: dict[str, Any] = {"prompt": self._chat.render(request.messages)}
            if request.images:
                prompt["multi_modal_data"] = {"image": request.images}
            prompts.append(prompt)
        params = [self._params(seed=request.seed, **self._sampling) for request in requests]
        return [self._reply(output) for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def _reply(self, output: Any) -> Reply:
        (completion,), ids = output.outputs, list(output.outputs[0].token_ids)
        return Reply(self._chat.decode(ids), len(ids), completion.finish_reason, len(output.prompt_token_ids))


class TransformersEngine:
    """`model.generate` on left-padded batches. Slower than vLLM, but available wherever Transformers is."""

    def __init__(self, settings: AnswerEngineSettings) -> None:
        import torch
        from transformers import GenerationConfig

        self.batch_size = settings.batch_size or 64
        self._chat = ChatProcessor(settings.model, settings.min_pixels, settings.max_pixels, settings.revision)
        self.resolved = self._chat.resolved(settings.dtype)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = self._chat.auto_class.from_pretrained(
            settings.model, revision=settings.revision, dtype=getattr(torch, self._chat.dtype(settings.dtype)),
            trust_remote_code=False,
        )  # fmt: skip
        self._model = model.to(self._device).eval()
        self._max_tokens = settings.max_tokens
        self._eos_ids = _end_tokens(model.generation_config.eos_token_id)
        # A fresh one, because `generate` fills in what is not given from the model's own: Qwen2.5-VL's has a repetition
        # penalty of 1.05, which vLLM (given explicit sampling parameters) does not apply.
        sampled = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
        model.generation_config = GenerationConfig(
            eos_token_id=self._eos_ids,
            pad_token_id=self._chat.pad_id,
            suppress_tokens=self._chat.banned_ids or None,
            **(sampled if settings.temperature > 0 else {"do_sample": False}),
        )

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply | Unanswerable]:
        return answered(self._chat, requests, self._generate)

    def _generate(self, requests: Sequence[AnswerRequest]) -> list[Reply]:
        import torch

        inputs = self._chat.encode([(request.messages, request.images) for request in requests]).to(self._device)
        width = inputs["input_ids"].shape[1]
        room = min(self._max_tokens, self._chat.context - width)
        torch.manual_seed(requests[0].seed)
        with torch.inference_mode():
            sequences = self._model.generate(**inputs, max_new_tokens=room)
        prompt_lengths = inputs["attention_mask"].sum(dim=1).tolist()
        return [
            self._answer(ids, length) for ids, length in zip(sequences[:, width:].tolist(), prompt_lengths, strict=True)
        ]

    def _answer(self, ids: list[int], n_prompt_tokens: int) -> Reply:
        """An answer up to and with its first end token. Without one it was cut off by the limit on its length."""
        end = next((i for i, token in enumerate(ids) if token in self._eos_ids), None)
        kept = ids if end is None else ids[: end + 1]
        return Reply(self._chat.decode(kept), len(kept), "length" if end is None else "stop", n_prompt_tokens)


def _end_tokens(eos: int | list[int] | None) -> list[int]:
    """The end tokens of a generation config, which names one, several or none."""
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
