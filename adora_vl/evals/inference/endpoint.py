"""The engine `openai`: a model behind an OpenAI-compatible endpoint.

The server decides about dtype, pixels and the tokens that a model may never say; the prompt is the
same as elsewhere, with the images as PNG in data URLs. An answer that could not be had is left out
and asked for again by the next start, unless its prompt is too long for the server's model.
"""

import base64
import sys
from collections.abc import Sequence
from typing import Any

from adora_vl.data.images import png_bytes
from adora_vl.evals.inference.requests import (
    AnswerEngineSettings,
    AnswerRequest,
    EngineOptions,
    Unanswerable,
)
from adora_vl.utils.cli import pluralize
from adora_vl.utils.errors import UserError
from adora_vl.utils.openai_client import (
    NEUTRAL_SAMPLING_FIELDS,
    SERVERS_WITH_MODEL_DEFAULTS,
    ChatClient,
    Endpoint,
    EndpointError,
    Messages,
    Reply,
    check_url,
)

_DEFAULT_BATCH_SIZE = 64  # answers that are written at once
# The name of the program in a fingerprint, for a server that does not say it.
UNKNOWN_SERVER = "unknown"
# These options work only for an engine in this process, not for a server.
_LOCAL_OPTIONS = ("min_pixels", "max_pixels", "revision", "dtype")


def build_endpoint(options: EngineOptions) -> Endpoint | None:
    """Return the endpoint that the options name; None for an engine in this process.

    Raises `UserError` for an address that is missing or not used, and for options that do not work
    with a server.
    """
    if options.engine != "openai":
        if options.base_url:
            raise UserError(
                "base_url: only --engine openai asks a server; add it, or leave --base-url out"
            )
        return None
    if not options.base_url:
        raise UserError(
            "--base-url is missing; --engine openai needs an address such as "
            "http://localhost:8000/v1"
        )
    for name in _LOCAL_OPTIONS:
        is_default = getattr(options, name) in (None, "auto")
        if not is_default:
            option = name.replace("_", "-")
            raise UserError(
                f"{name}: the server of --engine openai decides; leave --{option} out and set it "
                "there"
            )
    return Endpoint(
        url=check_url("base_url", options.base_url),
        model=options.model,
        timeout_s=options.timeout,
        workers=options.concurrency,
    )


class EndpointEngine:
    """Asks a server for the answers of a batch, several at once."""

    def __init__(self, settings: AnswerEngineSettings) -> None:
        """Create the client of the endpoint that the settings name."""
        assert settings.endpoint is not None  # there is one for the engine `openai`
        self.batch_size = settings.batch_size or _DEFAULT_BATCH_SIZE
        self._client = ChatClient(settings.endpoint)
        # The name of the server program, such as `vllm`. It is empty if the server has a list of
        # models that does not name it, and None if the server did not reply.
        server_program = self._client.detect_server_program()
        # The settings of the engine that go into the fingerprint of a run. The program is left out,
        # and so not compared later, if the server was too busy to tell it.
        self.resolved_settings: dict[str, Any] = {"base_url": settings.endpoint.url}
        if server_program is not None:
            self.resolved_settings["server"] = server_program or UNKNOWN_SERVER
        # The fields of each call beside the messages and the seed.
        self._request_fields: dict[str, Any] = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        # A note that the server may sample by its own defaults; None after it has been printed.
        self._pending_note: str | None = None
        # These servers sample by the defaults of the model's generation config, such as a
        # repetition penalty. `NEUTRAL_SAMPLING_FIELDS` switches them off.
        if server_program in SERVERS_WITH_MODEL_DEFAULTS:
            self._request_fields |= NEUTRAL_SAMPLING_FIELDS
        else:
            self._pending_note = _note_on_server_defaults(settings.endpoint, server_program)
        if settings.chat_template_kwargs:
            self._request_fields["chat_template_kwargs"] = dict(settings.chat_template_kwargs)

    def generate(self, requests: Sequence[AnswerRequest]) -> list[Reply | Unanswerable | None]:
        """Return the replies to requests in their order, with None for a call that failed.

        A prompt that is too long for the server's model is `Unanswerable`.

        Failures are printed as one warning. Raises `UserError` if all calls failed: then the server
        is not there, or refuses the key.
        """
        # The constructor does not print the note, because its output goes into the log of the
        # start.
        if self._pending_note is not None:
            print(self._pending_note, file=sys.stderr)
            self._pending_note = None
        replies = self._client.map_in_threads(self._reply_or_error, requests)
        errors = [reply for reply in replies if isinstance(reply, EndpointError)]
        if errors and len(errors) == len(replies):
            if errors[0].key_refused:
                self._client.check_server("base_url")  # raises a `UserError` that names the key
            raise UserError(
                f"base_url: {self._client.endpoint.url} gave none of "
                f"{pluralize(len(replies), 'answer')}: {errors[0]}; what was answered before is "
                "kept"
            )
        if errors:
            print(
                f"warning: {pluralize(len(errors), 'call')} failed, the first: {errors[0]}",
                file=sys.stderr,
            )
        return [None if isinstance(reply, EndpointError) else reply for reply in replies]

    def _reply_or_error(self, request: AnswerRequest) -> Reply | Unanswerable | EndpointError:
        """Return the reply to one request, or the error of its call.

        It is `Unanswerable` for a prompt that is too long for the server's model, since no other
        attempt can answer it.
        """
        try:
            return self._client.chat(
                openai_messages(request), seed=request.seed, **self._request_fields
            )
        except EndpointError as error:
            return Unanswerable(str(error)) if error.prompt_too_long else error


def _note_on_server_defaults(endpoint: Endpoint, server_program: str | None) -> str:
    """Return a note that a server may sample by defaults of its own, and how to rule that out.

    Args:
        endpoint: The server and the model on it.
        server_program: The server program, such as `vllm`, that its list of models names; empty if
            it names none, and None if the server gave no list.
    """
    if server_program:
        server_text = f"names its program {server_program!r}, which is not known here"
    elif server_program is None:
        server_text = "did not reply when it was asked for its models"
    else:
        server_text = f"does not say in its list of models what serves {endpoint.model!r}"
    return (
        f"note: base_url: {endpoint.url} {server_text}; it may apply the model's own sampling defaults "
        "(repetition_penalty, top_k) to every answer: start vLLM with --generation-config vllm, "
        "SGLang with --sampling-defaults openai, and look at the defaults of any other"
    )


def openai_messages(request: AnswerRequest) -> Messages:
    """Convert the messages of a request to OpenAI's form, with each image in its place.

    The placeholders become the images of the request in their order, as PNG in data URLs.
    """
    encoded_images = (
        base64.b64encode(png_bytes(image.convert("RGB"))).decode() for image in request.images
    )

    def convert_part(part: dict[str, Any]) -> dict[str, Any]:
        """Replace a placeholder by the next image; a text stays as it is."""
        if part["type"] != "image":
            return part
        url = f"data:image/png;base64,{next(encoded_images)}"
        return {"type": "image_url", "image_url": {"url": url}}

    messages: list[dict[str, Any]] = []
    for message in request.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [convert_part(part) for part in content]
        messages.append({**message, "content": content})
    return messages
