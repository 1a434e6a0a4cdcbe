"""A server on loopback that stands for a vLLM server, for tests and measurements.

It understands as much of vLLM 0.31's HTTP as the trainer uses. It draws its answers from the seeds
of the requests, and waits before each for as long as it is told to.
"""

import base64
import io
import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import safe_open

IMAGE_TOKEN_PIXELS = 28  # the side of an image token
GENERATE_PATHS = ("/v1/completions", "/inference/v1/generate")
RequestBody = dict[str, Any]


class FakeVLLMServer:
    """A fake vLLM server, which answers until it is `dead`; then it drops every connection.

    A test may change these attributes:

    - `pace`: a factor on the seconds that an answer takes, by the number of syncs so far.
    - `spoil`: changes the replies with rollouts before they are sent.
    - `dead`: whether it drops every request.
    - `turns`: tokens of whole turns. In half of its answers it gives one of these.
    - `lora`: vLLM's settings of LoRA; None for a server without.
    - `in_four_bit`: whether its model is in 4 bits.
    - `logprobs_mode`, `context`, `vocabulary`: as vLLM's options of these names.

    It notes what it was sent:

    - `post_requests`: the path and the body of each POST request.
    - `logins`: the headers `Authorization` of GET requests.
    - `weights`: the names of the tensors that each sync has brought.
    - `served`: the names of its model and of its adapters.
    - `life`: an id that is new after each start.
    """

    def __init__(
        self,
        *,
        seconds_per_token: float = 0.0,
        tokens: int = 8,
        shortest: int | None = None,
        vocabulary: int = 300,
        context: int = 4096,
    ) -> None:
        """Start the server.

        Args:
            seconds_per_token: how long a request for rollouts waits, for each token of its limit.
            tokens: tokens of the longest rollout.
            shortest: tokens of the shortest rollout; None: all have `tokens`.
            vocabulary: how many token ids there are.
            context: how many tokens prompt and answer may have together (`--max-model-len`).
        """
        self.seconds_per_token = seconds_per_token
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.context = context
        self.shortest = tokens if shortest is None else shortest
        self.pace: Callable[[int], float] = lambda syncs: 1.0
        self.spoil: Callable[[RequestBody], RequestBody] = lambda reply: reply
        self.life = uuid.uuid4().hex
        self.logprobs_mode = "raw_logprobs"
        self.dead = False
        self.post_requests: list[tuple[str, RequestBody]] = []
        self.logins: set[str | None] = set()
        self.weights: list[list[str]] = []
        self.lora: RequestBody | None = None
        self.in_four_bit = False
        self.turns: list[list[int]] = []
        self.served = ["stand-in"]
        self._server = _Listener(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def close(self) -> None:
        """End the server, and free its port."""
        self._server.shutdown()
        self._server.server_close()

    def start_again(self) -> None:
        """Become a server that was killed and started again, with the weights of its checkpoint."""
        self.life = uuid.uuid4().hex
        self.dead = False
        self.weights = []
        self.served = self.served[:1]

    def get_reply(self, path: str) -> RequestBody | None:
        """Return the reply to a GET request; None for an unknown path."""
        if path == "/health":
            return {}
        if path == "/v1/models":
            return {"data": [{"id": "stand-in", "max_model_len": self.context}]}
        if path != "/server_info":
            return None
        model_config = {
            "logprobs_mode": self.logprobs_mode,
            "model": self.served[0],
            "quantization": "bitsandbytes" if self.in_four_bit else None,
        }
        return {
            "vllm_config": {
                "instance_id": self.life,
                "model_config": model_config,
                "lora_config": self.lora,
            },
            "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
        }

    def post_reply(self, path: str, body: RequestBody) -> RequestBody | None:
        """Note a POST request, carry it out, and return the reply; None for an unknown model."""
        self.post_requests.append((path, body))
        if path in GENERATE_PATHS:
            if body["model"] not in self.served:
                return None
            token_limit = body.get("sampling_params", body)["max_tokens"]
            time.sleep(self.seconds_per_token * token_limit * self.pace(len(self.weights)))
            return self.spoil({"choices": self._rollouts(path, body)})
        if path == "/v1/chat/completions/render":
            return {"features": image_features(body["messages"])}
        if path == "/collective_rpc":
            self._read_weights(Path(body["kwargs"]["weights_path"]))
        if path == "/v1/load_lora_adapter":
            self._read_weights(Path(body["lora_path"]))
            self.served.append(body["lora_name"])
        if path == "/v1/unload_lora_adapter":
            self.served.remove(body["lora_name"])
        return {"success": True}

    def exceeds_context(self, path: str, body: RequestBody) -> bool:
        """Return whether vLLM refuses a request for its length.

        A prompt of token ids has to leave room for one token, and a prompt of text for all tokens
        that the request allows.
        """
        if path not in GENERATE_PATHS:
            return False
        if "token_ids" in body:
            return len(body["token_ids"]) >= self.context
        return len(body["prompt"][0]) + int(body["max_tokens"]) > self.context

    def _read_weights(self, folder: Path) -> None:
        """Note the names of the tensors in a folder of weights."""
        names: list[str] = []
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                names += tensors.keys()
        self.weights.append(sorted(names))

    def _rollouts(self, path: str, body: RequestBody) -> list[RequestBody]:
        """Draw the rollouts of a request, and return them in the form of its path.

        The tokens follow from the prompt and the seed, plus the number of the rollout, so a request
        that is sent again gets the same ones.
        """
        parameters = body.get("sampling_params", body)
        prompt_ids = body["token_ids"] if "token_ids" in body else body["prompt"][0]
        banned_ids = {int(token) for token in parameters.get("logit_bias") or {}}
        allowed_ids = [token for token in range(self.vocabulary) if token not in banned_ids]
        rollouts = []
        for member in range(parameters.get("n", 1)):
            rng = random.Random(f"{prompt_ids} {parameters.get('seed', 0) + member}")
            tokens = self._draw_tokens(rng, allowed_ids)
            tokens = tokens[: parameters.get("max_tokens")]
            tokens = tokens[: self.context - len(prompt_ids)]
            logps = [-rng.random() for _ in tokens]
            rollouts.append(
                {
                    "prompt_token_ids": prompt_ids,
                    "token_ids": tokens,
                    "logprobs": _logprobs_reply(path, tokens, logps),
                }
            )
        return rollouts

    def _draw_tokens(self, rng: random.Random, allowed_ids: list[int]) -> list[int]:
        """Draw the tokens of a rollout, of allowed ones or a whole turn of `turns`."""
        length = self.tokens
        if self.shortest < self.tokens:
            length = rng.randint(self.shortest, self.tokens)
        tokens = rng.choices(allowed_ids, k=length)
        if self.turns and rng.random() < 0.5:
            return rng.choice(self.turns)
        return tokens


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection for a stand-in."""

    protocol_version = "HTTP/1.1"
    # Otherwise a reply, which is two writes, takes 40 ms on loopback.
    disable_nagle_algorithm = True

    def __init__(self, stand_in: FakeVLLMServer, *args: Any) -> None:
        self.stand_in = stand_in
        super().__init__(*args)  # answers the requests of the connection

    def do_GET(self) -> None:
        self.stand_in.logins.add(self.headers["Authorization"])
        self._send(self.stand_in.get_reply(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = json.loads(content or b"{}")
        path = self.path.partition("?")[0]
        if self.stand_in.exceeds_context(path, body):
            self._send({"error": "the prompt is longer than the context"}, status=400)
        else:
            self._send(self.stand_in.post_reply(path, body))

    def _send(self, reply: RequestBody | None, status: int = 200) -> None:
        """Send a reply as JSON, with status 404 where there is none."""
        if self.stand_in.dead:
            self.close_connection = True
            return
        content = json.dumps(reply).encode()
        self.send_response(404 if reply is None else status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing about requests."""


class _Listener(ThreadingHTTPServer):
    """Listens for many connections at once."""

    daemon_threads = True
    request_queue_size = 256


def _logprobs_reply(path: str, tokens: list[int], logps: list[float]) -> RequestBody:
    """Return the log-probabilities of tokens in the form of a path: of text, or of token ids."""
    names = [f"token_id:{token}" for token in tokens]
    if path == GENERATE_PATHS[0]:
        return {"tokens": names, "token_logprobs": logps, "top_logprobs": [None] * len(tokens)}
    content = [
        {"token": name, "logprob": logp, "top_logprobs": []}
        for name, logp in zip(names, logps, strict=True)
    ]
    return {"content": content}


def image_features(messages: list[RequestBody]) -> RequestBody:
    """Return how many tokens the images of a conversation have, as vLLM renders them.

    Their patches are left out, and every offset is 0.
    """
    lengths = []
    for message in messages:
        for part in message["content"]:
            encoded_image = part["image_url"]["url"].partition(",")[2]
            image = Image.open(io.BytesIO(base64.b64decode(encoded_image)))
            columns = image.width // IMAGE_TOKEN_PIXELS
            rows = image.height // IMAGE_TOKEN_PIXELS
            lengths.append(columns * rows)
    return {"mm_placeholders": {"image": [{"offset": 0, "length": length} for length in lengths]}}
