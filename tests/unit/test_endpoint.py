"""Served models: as the engine of an evaluation, and as a judge that rewards. The key is shown nowhere."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from adora_vl.endpoint import Client, Endpoint, EndpointError, check_url
from adora_vl.errors import UserError
from adora_vl.rewards import choose_rewards, try_rewards
from adora_vl.rewards.judge import KEY_VARIABLE, score_in
from data_prep.storage import write_split
from data_prep.synthetic.generate import generate
from eval.command import main
from eval.compare import main as compare
from eval.geometry3k.benchmark import BENCHMARK
from tests.endpoint_server import Answer, Reply, Server, completion

Serve = Callable[[Answer], Server]
KEY = "sk-a-secret-of-somebody"


def client(server: Server, **options: Any) -> Client:
    more = {name: options.pop(name) for name in ("cache", "budget") if name in options}
    return Client(Endpoint(server.url, "m", **({"wait_s": 0.001, "timeout_s": 5.0} | options)), **more)


HELLO = [{"role": "user", "content": "hello"}]


def test_waits_grow_and_what_the_server_asks_for_is_waited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("adora_vl.endpoint.time.sleep", waits.append)
    server = serve(lambda body, call: (503, b"") if call < 4 else completion("hi"))
    assert client(server, wait_s=1.0).chat(HELLO).text == "hi"
    assert waits == [1.0, 2.0, 4.0]


def test_a_budget_counts_attempts_and_what_is_over_it_is_a_failure(serve: Serve) -> None:
    server = serve(lambda body, call: (500, b"") if call == 1 else completion("hi"))
    asking = client(server, budget=2)
    assert asking.chat(HELLO).text == "hi"
    with pytest.raises(EndpointError, match="the budget of 2 calls is used up"):
        asking.chat(HELLO)
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 302])
def test_the_key_is_sent_to_the_address_alone_and_never_shown(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = serve(lambda body, call: (status, f"no model for {KEY}\nat all".encode()))
    with pytest.raises(EndpointError) as error:
        client(server).chat(HELLO)
    assert [request["key"] for request in server.requests] == [f"Bearer {KEY}"]
    assert KEY not in str(error.value) and f"HTTP {status}" in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError) as refused:
        check_url("base_url", f"http://me:{KEY}@localhost:8000/v1")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:8000", "http://", "ftp://x/y"])
def test_what_is_no_http_address_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="is no http address"):
        check_url("base_url", url)


# ------------------------------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_split(generate(6, seed=3, split="test"), folder, "test")
    return folder


def infer(data: Path, output: Path, url: str, *words: str, verb: str = "run") -> int:
    options = ["--data", str(data), "--output", str(output), "--engine", "openai", "--base-url", url, "--model", "m"]
    return main(BENCHMARK, [verb, *options, *words])


def picture(body: dict[str, Any]) -> Image.Image:
    """The image of a request."""
    (part,) = [part for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


def test_a_served_model_is_asked_with_its_images_scored_resumed_and_compared(
    data: Path, tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    refused: list[str] = []

    def answer(body: dict[str, Any], call: int) -> Reply:
        text = body["messages"][-1]["content"][-1]["text"]
        if not refused or (text in refused[:1] and len(refused) < 2):
            refused.append(text)
            return 400, b"this one I cannot"
        return completion(r"\boxed{5}", finish_reason="length", usage={"completion_tokens": 7, "prompt_tokens": 9})

    server = serve(answer)
    assert infer(data, tmp_path / "a", server.url, "--concurrency", "1") == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == (
        "error: base_url: 1 answer of 6 could not be had; start the same command again, which asks for those alone"
    )
    assert any(line == "warning: 1 call failed, the first: HTTP 400: this one I cannot (attempt 1)" for line in error)
    rows = [json.loads(line) for line in (tmp_path / "a" / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 5 and {(row["n_tokens"], row["finish_reason"]) for row in rows} == {(7, "length")}
    assert picture(server.requests[0]).size == tuple(rows[0]["image_size"])
    assert server.requests[0]["messages"][0]["role"] == "system" and server.requests[0]["temperature"] == 0
    before = len(server.requests)
    refused += ["", ""]
    assert infer(data, tmp_path / "a", server.url) == 0
    assert len(server.requests) == before + 1
    score = json.loads((tmp_path / "a" / "score.json").read_text())
    assert score["coverage"] == {"answers": 6, "asked": 6, "in_data": 6}
    pids = [json.loads(line)["pid"] for line in (tmp_path / "a" / "predictions.jsonl").read_text().splitlines()]
    other = serve(lambda body, call: completion(r"\boxed{6}"))
    assert infer(data, tmp_path / "b", other.url) == 0
    assert pids == [json.loads(line)["pid"] for line in (tmp_path / "b" / "predictions.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "common problems" in capsys.readouterr().out


def test_a_server_that_gives_nothing_ends_the_run_at_once(
    data: Path, tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(lambda body, call: (404, b"the model `m` does not exist"))
    assert infer(data, tmp_path / "a", server.url, "--batch-size", "2", "--concurrency", "1") == 2
    assert len(server.requests) == 2
    assert "gave none of 2 answers: HTTP 404: the model `m` does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "openai"], "--base-url is missing"),
        (["--engine", "openai", "--base-url", "localhost:8000"], "is no http address"),
        (["--engine", "transformers", "--base-url", "http://x/v1"], "only --engine openai asks a server"),
        (["--engine", "openai", "--base-url", "http://x/v1", "--max-pixels", "100352"], "max_pixels: the server of"),
        (["--engine", "openai", "--base-url", "http://x/v1", "--dtype", "float32"], "dtype: the server of"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    data: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(BENCHMARK, ["run", "--model", "tiny", "--data", str(data), "--output", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ the judge as a reward

ASKED = ["five", "six", "seven"]


def judge(tmp_path: Path, url: str, **options: Any) -> Any:
    given = {"base_url": url, "model": "j", "wait": 0.001, "attempts": 2} | options
    return choose_rewards(["judge"], {"judge": given}, output_dir=tmp_path).functions[0]


def rewards(function: Any, metrics: dict[str, float]) -> list[float | None]:
    completions = [[{"role": "assistant", "content": f"It is {word}."}] for word in ASKED]
    found: list[float | None] = function(
        prompts=[[{"role": "user", "content": "?"}]] * 3, completions=completions, answer=["5"] * 3,
        log_metric=metrics.__setitem__,
    )  # fmt: skip
    return found


def reads(body: dict[str, Any], _: int) -> Reply:
    text = body["messages"][1]["content"]
    if "seven" in text:
        return 500, b""
    return completion(f"Hm. <score>{1 if 'five' in text else 0.25}</score>")


def test_a_failed_call_is_not_scored_counted_and_never_a_zero(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    server, metrics = serve(reads), dict[str, float]()
    function = judge(tmp_path, server.url)
    assert rewards(function, metrics) == [1.0, 0.25, None]
    assert metrics == {"judge/failed": pytest.approx(1 / 3), "judge/cached": 0.0}
    assert len(server.requests) == 4  # the failed one twice
    rewards(function, metrics)
    assert len(server.requests) == 6 and metrics["judge/cached"] == pytest.approx(2 / 3)
    assert capsys.readouterr().err.count("warning: the judge failed, the first time: HTTP 500 (attempt 2)") == 1
    cache = (tmp_path / "judge_cache.jsonl").read_text()
    assert len(cache.splitlines()) == 2 and KEY not in cache
    again = judge(tmp_path, server.url)  # as a resumed run has it
    assert rewards(again, metrics)[:2] == [1.0, 0.25] and len(server.requests) == 8


def test_a_budget_leaves_the_rest_unscored(tmp_path: Path, serve: Serve) -> None:
    server = serve(lambda body, call: completion("<score>1</score>"))
    found = rewards(judge(tmp_path, server.url, budget=2, concurrency=1), {})
    assert found == [1.0, 1.0, None] and len(server.requests) == 2


@pytest.mark.parametrize("text", ["1", "<score>", "<score>yes</score>", "<score>1.5</score>", "<score>nan</score>"])
def test_what_is_no_score_is_a_failure(text: str) -> None:
    with pytest.raises(EndpointError):
        score_in(text)


def test_the_judge_is_tried_before_the_run(tmp_path: Path, serve: Serve) -> None:
    server = serve(lambda body, call: (401, b"no key"))
    options = {"judge": {"base_url": server.url, "model": "j"}}
    chosen = choose_rewards(["accuracy", "judge"], options, output_dir=tmp_path)
    message = f"{re.escape(server.url)} with the model 'j' gave no answer: HTTP 401: no key .*{KEY_VARIABLE}"
    with pytest.raises(UserError, match=message):
        try_rewards(chosen, [], None, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "judge: base_url is missing"),
        ({"judge": {"base_url": "http://x/v1"}}, "judge: model is missing"),
        ({"judge": {"base_url": "x", "model": "j"}}, "is no http address"),
        (
            {"judge": {"base_url": "http://x/v1", "model": "j", "modle": 1}},
            "unknown option 'modle'; did you mean 'model'",
        ),
        ({"judge": {"base_url": "http://x/v1", "model": "j", "budget": 1.5}}, "budget: 1.5 is not a whole number"),
        (
            {"judge": {"base_url": "http://x/v1", "model": "j", "attempts": 0}},
            "attempts: 0 is not a whole number of at",
        ),
        ({"judge": {"base_url": "http://x/v1", "model": "j", "timeout": "a"}}, "timeout: 'a' is not a number"),
    ],
)
def test_options_of_a_judge_that_do_not_fit_are_one_line(options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_rewards(["judge"], options)
