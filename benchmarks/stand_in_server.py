"""Serves on loopback in the place of vLLM, for tests and measurements.

It waits for as long as it should, and its answers are drawn from the seeds of the requests. It
speaks as much of vLLM 0.31's HTTP as the trainer does.
"""

import base64
import io
import json
import random
import threading
import time
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors import safe_open

IMAGE_TOKEN_PIXELS = 28  # the side of an image token
GENERATE_PATHS = ("/v1/completions", "/inference/v1/generate")
RequestBody = dict[str, Any]


class StandIn:
    """Answers until it is `dead`; then it drops what it is asked, and new connections too."""

    def __init__(
        self,
        *,
        seconds_per_token: float = 0.0,
        tokens: int = 8,
        shortest: int | None = None,
        vocabulary: int = 300,
        context: int = 4096,
    ) -> None:
        """`seconds_per_token`: how long a request for rollouts waits, by its limit.

        `tokens`: of a rollout, or with `shortest` at the most. `context`: its `--max-model-len`.
        """
        self.seconds_per_token = seconds_per_token
        self.tokens = tokens
        self.vocabulary = vocabulary
        self.context = context
        self.shortest = tokens if shortest is None else shortest
        # times those seconds, by the syncs so far
        self.pace: Callable[[int], float] = lambda syncs: 1.0
        self.life = uuid.uuid4().hex
        self.logprobs_mode = "raw_logprobs"
        self.dead = False
        self.asked: list[tuple[str, RequestBody]] = []
        self.logins: set[str | None] = set()
        self.weights: list[list[str]] = []  # the names of the tensors that each sync brought
        self.lora: RequestBody | None = None  # vLLM's settings of it
        self.in_four_bit = False
        # Tokens of whole turns, one of which it gives in half of its answers.
        self.turns: list[list[int]] = []
        self.served = ["stand-in"]  # the names of the model and of adapters
        self.spoil: Callable[[RequestBody], RequestBody] = lambda reply: (
            reply
        )  # of the replies with rollouts
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # else a reply, which is two writes, takes 40 ms on loopback
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                outer.logins.add(self.headers["Authorization"])
                self._reply(outer.told(self.path.partition("?")[0]))

            def do_POST(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}"
                )
                path = self.path.partition("?")[0]
                if outer.exceeds_context(path, body):
                    self._reply({"error": "the prompt is longer than the context"}, status=400)
                else:
                    self._reply(outer.answered(path, body))

            def _reply(self, reply: RequestBody | None, status: int = 200) -> None:
                if outer.dead:
                    self.close_connection = True
                    return
                content = json.dumps(reply).encode()
                self.send_response(404 if reply is None else status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        class Listening(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Listening(("127.0.0.1", 0), Handler)
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

    def told(self, path: str) -> RequestBody | None:
        """Return the reply to a GET request; None for an unknown path."""
        model = {"logprobs_mode": self.logprobs_mode, "model": self.served[0]}
        model["quantization"] = "bitsandbytes" if self.in_four_bit else None
        config = {"instance_id": self.life, "model_config": model, "lora_config": self.lora}
        answers: dict[str, RequestBody] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "stand-in", "max_model_len": self.context}]},
            "/server_info": {
                "vllm_config": config,
                "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
            },
        }
        return answers.get(path)

    def answered(self, path: str, body: RequestBody) -> RequestBody | None:
        """Return the reply to a POST request, and note it; None for an unknown model."""
        self.asked.append((path, body))
        if path in GENERATE_PATHS:
            if body["model"] not in self.served:
                return None
            tokens = body.get("sampling_params", body)["max_tokens"]
            time.sleep(self.seconds_per_token * tokens * self.pace(len(self.weights)))
            return self.spoil({"choices": self._rollouts(path, body)})
        if path == "/v1/chat/completions/render":
            return {"features": image_features(body["messages"])}
        if path == "/collective_rpc":
            self._read(Path(body["kwargs"]["weights_path"]))
        if path == "/v1/load_lora_adapter":
            self._read(Path(body["lora_path"]))
            self.served.append(body["lora_name"])
        if path == "/v1/unload_lora_adapter":
            self.served.remove(body["lora_name"])
        return {"success": True}

    def exceeds_context(self, path: str, body: RequestBody) -> bool:
        """Return whether vLLM refuses a request for its length.

        A prompt has to leave room for a token, and one of text for all tokens that are asked for.
        """
        if path not in GENERATE_PATHS:
            return False
        if "token_ids" in body:
            return len(body["token_ids"]) >= self.context
        return len(body["prompt"][0]) + int(body["max_tokens"]) > self.context

    def _read(self, folder: Path) -> None:
        """Note the names of the tensors in a folder of weights."""
        names: list[str] = []
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                names += tensors.keys()
        self.weights.append(sorted(names))

    def _rollouts(self, path: str, body: RequestBody) -> list[RequestBody]:
        """Draw the rollouts of a request from its seed and its prompt."""
        parameters = body.get("sampling_params", body)
        ids = body["token_ids"] if "token_ids" in body else body["prompt"][0]
        banned = {int(token) for token in parameters.get("logit_bias") or {}}
        allowed = [token for token in range(self.vocabulary) if token not in banned]
        rollouts = []
        for member in range(parameters.get("n", 1)):
            rng = random.Random(f"{ids} {parameters.get('seed', 0) + member}")
            length = (
                rng.randint(self.shortest, self.tokens)
                if self.shortest < self.tokens
                else self.tokens
            )
            tokens = rng.choices(allowed, k=length)
            if self.turns and rng.random() < 0.5:
                tokens = rng.choice(self.turns)
            tokens = tokens[: parameters.get("max_tokens")][: self.context - len(ids)]
            names = [f"token_id:{token}" for token in tokens]
            logps = [-rng.random() for _ in tokens]
            pairs = list(zip(names, logps, strict=True))
            if path == GENERATE_PATHS[0]:
                logprobs: RequestBody = {
                    "tokens": names,
                    "token_logprobs": logps,
                    "top_logprobs": [None] * len(tokens),
                }
            else:
                logprobs = {
                    "content": [{"token": t, "logprob": p, "top_logprobs": []} for t, p in pairs]
                }
            rollouts.append({"prompt_token_ids": ids, "token_ids": tokens, "logprobs": logprobs})
        return rollouts


def image_features(messages: list[RequestBody]) -> RequestBody:
    """Return the places of the images of a conversation, without their patches."""
    urls = [part["image_url"]["url"] for message in messages for part in message["content"]]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    lengths = [
        (image.width // IMAGE_TOKEN_PIXELS) * (image.height // IMAGE_TOKEN_PIXELS)
        for image in images
    ]
    return {"mm_placeholders": {"image": [{"offset": 0, "length": length} for length in lengths]}}
