"""Served models: as the engine of an evaluation, and as a judge that rewards.

The key is shown nowhere.
"""

import base64
import html
import io
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from adora_vl.data.dataset import write_split
from adora_vl.rewards import choose_rewards, try_rewards
from adora_vl.rewards.judge import KEY_VARIABLE, parse_score
from adora_vl.rewards.safe_call import RewardFailure, safe_call
from adora_vl.synthetic.generate import generate
from adora_vl.utils.cli import flow_mapping
from adora_vl.utils.errors import UserError
from adora_vl.utils.http_client import is_this_machine
from adora_vl.utils.openai_client import ChatClient, Endpoint, EndpointError, check_url
from eval.command import main
from eval.compare import main as compare
from eval.geometry3k import BENCHMARK
from tests.support.endpoint_server import EndpointServer, Reply, ReplyFunction, completion_reply

ROOT = Path(__file__).parents[3]
KEY_OF_SOMEBODY = "sk-a-secret-of-somebody"


def build_chat_client(server: EndpointServer, **options: Any) -> ChatClient:
    """Return a client of this server that waits 1 ms between attempts.

    `options`: of the endpoint, or `cache` and `budget` of the client.
    """
    arguments = {name: options.pop(name) for name in ("cache", "budget") if name in options}
    return ChatClient(
        Endpoint(server.url, "m", **({"wait_s": 0.001, "timeout_s": 5.0} | options)), **arguments
    )


def reply_in_turn(*replies: Reply) -> ReplyFunction:
    """Return a reply function that answers each call with the next of the replies."""
    return lambda body, call: replies[call - 1]


HELLO_MESSAGES = [{"role": "user", "content": "hello"}]


def test_waits_grow_and_what_the_server_asks_for_is_waited(start_server, monkeypatch):
    """Three attempts fail; before each further one the wait is twice as long."""
    waits: list[float] = []
    # the servers of other tests sleep, too
    clock = SimpleNamespace(sleep=waits.append, monotonic=time.monotonic)
    monkeypatch.setattr("adora_vl.utils.openai_client.time", clock)
    server = start_server(lambda body, call: (503, b"") if call < 4 else completion_reply("hi"))
    assert build_chat_client(server, wait_s=1.0).chat(HELLO_MESSAGES).text == "hi"
    assert waits == [1.0, 2.0, 4.0]


def test_a_budget_counts_attempts_and_what_is_over_it_is_a_failure(start_server):
    """One call of two attempts uses up a budget of 2, and the next call is not sent."""
    server = start_server(lambda body, call: (500, b"") if call == 1 else completion_reply("hi"))
    client = build_chat_client(server, budget=2)
    assert client.chat(HELLO_MESSAGES).text == "hi"
    with pytest.raises(EndpointError, match="the budget of 2 calls is used up"):
        client.chat(HELLO_MESSAGES)
    assert len(server.requests) == 2


def test_the_key_is_sent_to_the_address_alone_and_never_shown(start_server, monkeypatch):
    """An error has the server's words without the key, on one line; a redirect is not followed."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY_OF_SOMEBODY)
    for status in (400, 401, 302):
        server = start_server(
            reply_in_turn((status, f"no model for {KEY_OF_SOMEBODY}\nat all".encode()))
        )
        with pytest.raises(EndpointError) as error:
            build_chat_client(server).chat(HELLO_MESSAGES)
        assert [request["key"] for request in server.requests] == [f"Bearer {KEY_OF_SOMEBODY}"]
        assert KEY_OF_SOMEBODY not in str(error.value)
        assert f"HTTP {status}" in str(error.value)
        assert "\n" not in str(error.value)

    with pytest.raises(UserError) as url_error:
        check_url("base_url", f"http://me:{KEY_OF_SOMEBODY}@localhost:8000/v1")
    assert KEY_OF_SOMEBODY not in str(url_error.value)


def texts_with_key(key: str) -> dict[str, str]:
    """Return texts of a server that have the key in them, by how it is encoded there."""

    def in_base64(text: str) -> str:
        return b64encode(text.encode()).decode()

    behind_letters = {
        f"Base64 behind {count} letters": in_base64("x" * count + key + ":of me")
        for count in range(4)
    }
    return {
        "upper case": f"BEARER {key.upper()}",
        "for an address": f"?key={quote(key, safe='')}&more",
        "for JSON": json.dumps(f"the key {key}"),
        "for JSON of another library": json.dumps(key).replace("/", "\\/"),
        "for HTML": html.escape(key),
        "hexadecimal": key.encode().hex(),
        "Base64": in_base64(key),
        "Base64 for an address": urlsafe_b64encode(f"Bearer {key}".encode()).decode(),
        **behind_letters,
    }


def test_a_key_that_the_server_repeats_in_another_spelling_is_not_shown(start_server, monkeypatch):
    """The key is cut out of an error however it is encoded, and the words around it stay."""
    key = 'sk-Q/a+b"c&?>~9z7Kf0'
    monkeypatch.setenv("OPENAI_API_KEY", key)
    for name, spelling in texts_with_key(key).items():
        server = start_server(reply_in_turn((401, f"no model for {spelling} here".encode())))
        with pytest.raises(EndpointError) as error:
            build_chat_client(server).chat(HELLO_MESSAGES)
        message = str(error.value)
        assert "no model for" in message, name
        assert " here" in message, name
        assert "..." in message, name
        # neither the middle of the spelling, nor the key's first or last nine characters
        assert not any(
            part.lower() in message.lower() for part in (spelling[9:20], key[:9], key[-9:])
        ), f"{name}: {message}"


def test_a_proxy_gets_nothing_that_is_for_this_machine(start_server, monkeypatch):
    """A proxy of the environment gets requests for other machines only."""
    proxy = start_server(lambda body, call: completion_reply("of the proxy"))
    judge = start_server(lambda body, call: completion_reply("hi"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
    for url in (judge.url, judge.url.replace("127.0.0.1", "localhost")):
        assert ChatClient(Endpoint(url, "m", attempts=1)).chat(HELLO_MESSAGES).text == "hi"
    assert proxy.requests == []
    assert (
        ChatClient(Endpoint("http://judge.invalid/v1", "m", attempts=1)).chat(HELLO_MESSAGES).text
        == "of the proxy"
    )
    local_urls = (
        "http://[::1]:8000",
        "http://127.9.9.9/v1",
        "http://0.0.0.0:8000",
        "http://judge.localhost",
    )
    assert [
        is_this_machine(url) for url in (*local_urls, "http://10.0.0.1", "http://localhost.org")
    ] == [True] * 4 + [False] * 2


def test_an_address_that_the_server_does_not_know_is_shown(start_server):
    """A base URL with the path of a call is doubled; the error shows the address that was asked."""
    server = start_server(lambda body, call: (404, b"Not Found"))
    with pytest.raises(EndpointError) as error:
        ChatClient(Endpoint(f"{server.url}/chat/completions", "m", attempts=1)).chat(HELLO_MESSAGES)
    assert f"HTTP 404 at {server.url}/chat/completions/chat/completions: Not Found" in str(
        error.value
    )


def test_a_key_with_a_line_break_is_named_before_anything_is_sent(start_server, monkeypatch):
    """A file with two lines makes such a key; a line break at its end is no part of it."""
    server = start_server(lambda body, call: completion_reply("hi"))
    for key in (f"{KEY_OF_SOMEBODY}\nmore", f"{KEY_OF_SOMEBODY}\rmore", "ключ"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(
            EndpointError, match=r"the key in OPENAI_API_KEY has a character .* \(attempt 1\)"
        ) as error:
            build_chat_client(server).chat(HELLO_MESSAGES)
        assert key not in str(error.value)
        assert error.value.key_refused
        assert server.requests == []
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY_OF_SOMEBODY}\r\n")
    assert build_chat_client(server).chat(HELLO_MESSAGES).text == "hi"
    assert server.requests[0]["key"] == f"Bearer {KEY_OF_SOMEBODY}"


def test_a_reply_that_no_reader_can_read_is_a_failure_and_ends_nothing(start_server):
    """A reply that is nested too deeply is an error; a token count that is no number is 0."""
    deeply_nested_reply = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(EndpointError, match="is not a chat completion"):
        build_chat_client(
            start_server(lambda body, call: (200, deeply_nested_reply)), attempts=1
        ).chat(HELLO_MESSAGES)
    for tokens in (math.inf, math.nan, -7, 1e300, "many", [3], None):
        reply = completion_reply("hi", usage={"completion_tokens": tokens, "prompt_tokens": 9})
        chat_reply = build_chat_client(start_server(lambda body, call, reply=reply: reply)).chat(
            HELLO_MESSAGES
        )
        assert (chat_reply.text, chat_reply.n_tokens, chat_reply.n_prompt_tokens) == ("hi", 0, 9), (
            tokens
        )


REPLY_HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"


@pytest.fixture
def start_slow_server() -> Iterator[Callable[[bytes, bytes], str]]:
    """A function that starts a slow server and returns its address."""
    listeners: list[socket.socket] = []

    def start(at_once: bytes, slowly: bytes) -> str:
        """Start a server that sends some bytes at once, and others one by one every 50 ms."""
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            """Answer one connection, until the other side closes it."""
            with suppress(OSError), closing(listener.accept()[0]) as connection:
                connection.recv(65536)
                connection.sendall(at_once)
                for byte in slowly:
                    time.sleep(0.05)
                    connection.sendall(bytes([byte]))
                connection.shutdown(socket.SHUT_WR)
                # bytes that were not received would reset the connection when it is closed
                while connection.recv(65536):
                    pass

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    yield start
    for listener in listeners:
        listener.close()


def test_the_time_out_bounds_the_whole_call(start_slow_server):
    """A reply that sends a byte every 50 ms takes over 5 s, though no single wait is too long."""
    body = completion_reply("hi" + 100 * " ")[1]
    for at_once, slowly in (
        (REPLY_HEAD, body),
        (b"", REPLY_HEAD + body),
        (b"HTTP/1.0 400 no\r\n\r\n", body),
    ):
        start_time = time.monotonic()
        with pytest.raises(EndpointError, match=r"TimeoutError|HTTP 400 \("):
            ChatClient(
                Endpoint(start_slow_server(at_once, slowly), "m", timeout_s=0.4, attempts=1)
            ).chat(HELLO_MESSAGES)
        assert 0.3 < time.monotonic() - start_time < 2

    slow_but_in_time = ChatClient(
        Endpoint(
            start_slow_server(REPLY_HEAD + body[:-4], body[-4:]), "m", timeout_s=20, attempts=1
        )
    )
    assert slow_but_in_time.chat(HELLO_MESSAGES).text.strip() == "hi"


def test_a_reply_without_end_is_a_failure_and_is_not_held(
    start_server, start_slow_server, monkeypatch
):
    """A reply of 3 MiB ends at the limit of 1 MiB, and one of half a MiB is read."""
    monkeypatch.setattr("adora_vl.utils.http_client._MAX_REPLY_BYTES", 2**20)
    url = start_slow_server(
        REPLY_HEAD + b'{"choices": [{"message": {"content": "' + 3 * 2**20 * b"a", b"a" * 1000
    )
    start_time = time.monotonic()
    with pytest.raises(EndpointError, match=r"the reply is larger than 1 MiB \(attempt 1\)"):
        ChatClient(Endpoint(url, "m", timeout_s=20, attempts=4, wait_s=0.001)).chat(HELLO_MESSAGES)
    assert time.monotonic() - start_time < 5, "it goes when the limit is reached, not at the end"
    assert (
        len(
            build_chat_client(start_server(lambda body, call: completion_reply("a" * 2**19)))
            .chat(HELLO_MESSAGES)
            .text
        )
        == 2**19
    )


def reply_without_text(reason: str, **message: Any) -> Reply:
    """Return a reply whose text is null, with this finish reason and further fields."""
    reply_choice = {"message": {"content": None, **message}, "finish_reason": reason}
    return 200, json.dumps({"choices": [reply_choice], "usage": {"completion_tokens": 9}}).encode()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("stop", {}),
        ("stop", {"refusal": "I will not."}),
        ("length", {"refusal": "I will"}),
        ("tool_calls", {"tool_calls": [{"id": "1"}], "reasoning_content": "I call."}),
    ],
)
def test_a_reply_without_text_is_asked_again_and_never_taken_for_an_answer(
    start_server, reason, message
):
    """Null with a refusal or a call of a tool is an error; an empty text is an answer."""
    null_reply = reply_without_text(reason, **message)
    server = start_server(lambda body, call: null_reply if call < 3 else completion_reply(""))
    with pytest.raises(
        EndpointError,
        match=rf"the reply has no text \(its finish_reason is '{reason}'\) \(attempt 2\)",
    ):
        build_chat_client(server, attempts=2).chat(HELLO_MESSAGES)
    assert build_chat_client(server).chat(HELLO_MESSAGES).text == "", (
        "a model may say nothing, and that is an answer"
    )


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("length", {}),
        ("length", {"reasoning_content": "So x = 5"}),
        ("stop", {"reasoning_content": "So x = 5"}),
        ("stop", {"reasoning": "So x = 5", "tool_calls": []}),
    ],
)
def test_thinking_without_an_answer_behind_it_is_an_empty_answer(start_server, reason, message):
    """A reply with thinking and no text is taken as an empty answer, and not asked for again.

    A server with a reasoning parser sends null. Asked again, the model would think as long.
    """
    server = start_server(lambda body, call: reply_without_text(reason, **message))
    reply = build_chat_client(server, attempts=4).chat(HELLO_MESSAGES)
    assert reply.text == ""
    assert reply.finish_reason == reason
    assert reply.n_tokens == 9
    assert len(server.requests) == 1


def test_a_form_that_was_cut_off_is_not_asked_for_again(start_server):
    """An unreadable reply is asked for again if it ended by itself, and not if it was cut off."""

    def refuse_text(text: str) -> str:
        raise EndpointError("no form")

    server = start_server(lambda body, call: reply_without_text("length"))
    with pytest.raises(EndpointError, match=r"no form; it was cut off at the limit .*attempt 1"):
        build_chat_client(server, attempts=4).ask(HELLO_MESSAGES, refuse_text)
    server = start_server(lambda body, call: completion_reply("no form"))
    with pytest.raises(EndpointError, match=r"no form \(attempt 2\)"):
        build_chat_client(server, attempts=2).ask(HELLO_MESSAGES, refuse_text)


def test_a_server_with_a_reasoning_parser_is_scored_on_all_problems(
    six_problems, tmp_path, start_server
):
    """An answer whose thinking was cut off is empty, truncated and wrong."""
    server = start_server(
        lambda body, call: (
            reply_without_text("length") if call < 3 else completion_reply(r"\boxed{0}")
        )
    )
    assert run_evaluation(six_problems, tmp_path / "a", server.url, "--concurrency", "1") == 0
    score = json.loads((tmp_path / "a" / "score.json").read_text())
    assert score["total"] == 6
    assert len(server.requests) == 6
    assert score["empty_responses"] == 2
    assert score["truncated"]["count"] == 2


def test_what_is_no_http_address_is_refused():
    """The error shows the address without name and password."""
    broken_urls = (
        "http://[::1",
        "http://x:port/v1",
        "http://x y/v1",
        "http://./v1",
        f"http://{'x' * 70}/v1",
    )
    for url in ("file:///etc/passwd", "localhost:8000", "http://", "ftp://x/y", *broken_urls):
        with pytest.raises(UserError, match="is no http address"):
            check_url("base_url", url)
    with pytest.raises(UserError, match="'x y/v1' is no http address"):
        check_url("base_url", f"http://me:{KEY_OF_SOMEBODY}@x y/v1")


# --------------------------------------------------------------------------------------- the engine


@pytest.fixture(scope="module")
def six_problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write six drawn problems as a test split, and return their folder."""
    folder = tmp_path_factory.mktemp("data")
    write_split(generate(6, seed=3, split="test"), folder, "test")
    return folder


def run_evaluation(
    data: Path, output: Path, url: str, *arguments: str, subcommand: str = "run"
) -> int:
    """Evaluate the model behind an address on a data set, and return the command's exit code."""
    options = [
        "--data",
        str(data),
        "--output",
        str(output),
        "--engine",
        "openai",
        "--base-url",
        url,
        "--model",
        "m",
    ]
    return main(BENCHMARK, [subcommand, *options, *arguments])


def image_in_request(body: dict[str, Any]) -> Image.Image:
    """Return the one image in a request."""
    (part,) = [part for part in body["messages"][-1]["content"] if part["type"] == "image_url"]
    return Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))


def test_a_served_model_is_asked_with_its_images_scored_resumed_and_compared(
    six_problems, tmp_path, start_server, capsys
):
    """One question is refused: the run ends, and the same command asks it alone again."""
    refused_questions: list[str] = []

    def answer(body: dict[str, Any], call: int) -> Reply:
        """Refuse the first question whenever it comes, until two refusals are noted."""
        text = body["messages"][-1]["content"][-1]["text"]
        if not refused_questions or (text in refused_questions[:1] and len(refused_questions) < 2):
            refused_questions.append(text)
            return 400, b"this one I cannot"
        return completion_reply(
            r"\boxed{5}", finish_reason="length", usage={"completion_tokens": 7, "prompt_tokens": 9}
        )

    server = start_server(answer)
    assert run_evaluation(six_problems, tmp_path / "a", server.url, "--concurrency", "1") == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == (
        "error: base_url: 1 answer of 6 could not be had; start the same command again, which "
        "asks for those alone"
    )
    assert any(
        line == "warning: 1 call failed, the first: HTTP 400: this one I cannot (attempt 1)"
        for line in error
    )
    predictions = [
        json.loads(line) for line in (tmp_path / "a" / "predictions.jsonl").read_text().splitlines()
    ]
    assert len(predictions) == 5
    assert {(row["n_tokens"], row["finish_reason"]) for row in predictions} == {(7, "length")}
    assert image_in_request(server.requests[0]).size == tuple(predictions[0]["image_size"])
    assert server.requests[0]["messages"][0]["role"] == "system"
    assert server.requests[0]["temperature"] == 0

    # the same command again, with a server that answers everything
    requests_before = len(server.requests)
    refused_questions += ["", ""]
    assert run_evaluation(six_problems, tmp_path / "a", server.url) == 0
    assert len(server.requests) == requests_before + 1
    score = json.loads((tmp_path / "a" / "score.json").read_text())
    assert score["coverage"] == {"answers": 6, "asked": 6, "in_data": 6}
    pids = [
        json.loads(line)["pid"]
        for line in (tmp_path / "a" / "predictions.jsonl").read_text().splitlines()
    ]

    other_server = start_server(lambda body, call: completion_reply(r"\boxed{6}"))
    assert run_evaluation(six_problems, tmp_path / "b", other_server.url) == 0
    assert pids == [
        json.loads(line)["pid"]
        for line in (tmp_path / "b" / "predictions.jsonl").read_text().splitlines()
    ]
    capsys.readouterr()
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "common problems" in capsys.readouterr().out


def test_a_prompt_that_is_too_long_for_the_server_is_recorded_and_not_asked_for_for_ever(
    six_problems, tmp_path, start_server, capsys
):
    """A prompt that is too long is recorded as such, and the evaluation goes on.

    A token limit that leaves no room for any answer is a mistake of the command's, which ends.
    """
    prompt_too_long = (
        b'{"message": "This model\'s maximum context length is 512 tokens. Your request has 600 '
        b'input tokens"}'
    )
    answer_too_long = (
        b'{"message": "max_tokens is too large: 512. This model\'s maximum context length is 512 '
        b'tokens"}'
    )
    server = start_server(
        lambda body, call: (400, prompt_too_long) if call == 1 else completion_reply(r"\boxed{5}")
    )
    assert run_evaluation(six_problems, tmp_path / "a", server.url, "--concurrency", "1") == 0
    stderr = capsys.readouterr().err
    assert "is not asked: HTTP 400: " in stderr
    assert "6 answered" in stderr
    assert "1 prompt too long" in stderr
    predictions = [
        json.loads(line) for line in (tmp_path / "a" / "predictions.jsonl").read_text().splitlines()
    ]
    assert [row["finish_reason"] for row in predictions] == ["prompt_too_long", *["stop"] * 5]
    assert (
        run_evaluation(
            six_problems,
            tmp_path / "b",
            start_server(lambda body, call: (400, answer_too_long)).url,
        )
        == 2
    )
    assert "gave none of 6 answers: HTTP 400: " in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_evaluation_does_not_wait_for_a_server_that_hangs(
    six_problems, tmp_path, start_server
):
    """Ctrl-C ends an evaluation within 40 s, although its server does not answer.

    A call may take its time-out four times, and `--timeout` is 600 s by default.
    """
    was_asked = threading.Event()
    server = start_server(lambda body, call: was_asked.set())
    options = [
        "--data",
        six_problems,
        "--output",
        tmp_path / "a",
        "--engine",
        "openai",
        "--base-url",
        server.url,
    ]
    command = [sys.executable, "-m", "eval.geometry3k", "infer", *map(str, options), "--model", "m"]
    # A test runner in the background ignores Ctrl-C, and its children would, too.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    with process:
        assert was_asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=40)
    assert process.returncode == 130
    assert stderr.splitlines()[-1].startswith("interrupted; what was answered is kept"), stderr


def test_a_server_that_gives_nothing_ends_the_run_at_once(
    six_problems, tmp_path, start_server, capsys
):
    """After the first batch of two failed whole, no further one is sent."""
    server = start_server(lambda body, call: (404, b"the model `m` does not exist"))
    assert (
        run_evaluation(
            six_problems, tmp_path / "a", server.url, "--batch-size", "2", "--concurrency", "1"
        )
        == 2
    )
    assert len(server.requests) == 2
    stderr = capsys.readouterr().err
    assert "gave none of 2 answers: HTTP 404 at" in stderr
    assert "the model `m` does not exist" in stderr


def test_a_key_that_the_evaluated_model_refuses_is_named(
    six_problems, tmp_path, start_server, capsys
):
    """The run ends with one line that names the variable of the key, and leaves no folder."""
    server = start_server(lambda body, call: (401, b"no"))
    assert run_evaluation(six_problems, tmp_path / "a", server.url) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: base_url: {server.url} refuses the key in OPENAI_API_KEY for the model 'm' "
        "(HTTP 401: no (attempt 1)); set OPENAI_API_KEY to one that it takes"
    )
    assert not (tmp_path / "a").exists()
    assert (
        run_evaluation(
            six_problems, tmp_path / "a", start_server(lambda body, call: completion_reply("5")).url
        )
        == 0
    )


ERROR_BY_WRONG_OPTIONS = {
    "--engine openai": "--base-url is missing",
    "--engine openai --base-url localhost:8000": "is no http address",
    "--engine transformers --base-url http://x/v1": "only --engine openai asks a server",
    "--engine openai --base-url http://x/v1 --max-pixels 100352": "max_pixels: the server of",
    "--engine openai --base-url http://x/v1 --dtype float32": "dtype: the server of",
}


def test_options_that_do_not_fit_are_one_line(six_problems, tmp_path, capsys):
    """Options of one engine are refused with another, before anything is asked."""
    command = ["run", "--model", "tiny", "--data", str(six_problems), "--output", str(tmp_path)]
    for wrong_arguments, message in ERROR_BY_WRONG_OPTIONS.items():
        assert main(BENCHMARK, [*command, *wrong_arguments.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


# ---------------------------------------------------------------------------- the judge as a reward

THREE_ANSWERS = ["five", "six", "seven"]


def build_judge(tmp_path: Path, url: str, **options: Any) -> Any:
    """Return the reward of a judge at this address, with two attempts a call."""
    judge_options = {"base_url": url, "model": "j", "wait": 0.001, "attempts": 2} | options
    return choose_rewards([{"judge": judge_options}], output_dir=tmp_path).functions[0]


def call_reward(
    function: Any, metrics: dict[str, float], unscored: dict[int, str] | None = None
) -> list[float | None]:
    """Call a reward as the trainer calls it, for three answers, and return its values.

    `unscored` gets the reason of each answer that has no score.
    """
    completions = [[{"role": "assistant", "content": f"It is {word}."}] for word in THREE_ANSWERS]
    failures: list[RewardFailure] = []
    values: list[float | None] = safe_call(
        function, "judge", timeout=None, failures=failures, unscored=unscored
    )(
        prompts=[[{"role": "user", "content": "?"}]] * 3,
        completions=completions,
        answer=["5"] * 3,
        log_metric=metrics.__setitem__,
    )
    for failure in failures:
        assert failure.is_users_mistake
        raise UserError(failure.reason)
    return values


def score_two_of_three(body: dict[str, Any], _: int) -> Reply:
    """Reply with 1 to the answer five, with 0.25 to six, and with an error to seven."""
    text = body["messages"][1]["content"]
    if "seven" in text:
        return 500, b""
    return completion_reply(f"Hm. <score>{1 if 'five' in text else 0.25}</score>")


def test_a_failed_call_is_not_scored_counted_and_never_a_zero(
    tmp_path, start_server, monkeypatch, capsys
):
    """Two answers are scored and cached; the third has no score, and is asked for each time."""
    monkeypatch.setenv(KEY_VARIABLE, KEY_OF_SOMEBODY)
    server = start_server(score_two_of_three)
    metrics = dict[str, float]()
    judge = build_judge(tmp_path, server.url)
    unscored: dict[int, str] = {}
    assert call_reward(judge, metrics, unscored) == [1.0, 0.25, None]
    assert unscored == {2: "EndpointError: HTTP 500 (attempt 2)"}
    assert metrics == {"judge/failed": pytest.approx(1 / 3), "judge/cached": 0.0}
    assert len(server.requests) == 4  # the failed one twice
    call_reward(judge, metrics)
    assert len(server.requests) == 6  # the failed one alone, twice
    assert metrics["judge/cached"] == pytest.approx(2 / 3)
    assert (
        capsys.readouterr().err.count(
            "warning: the judge failed, the first time: HTTP 500 (attempt 2)"
        )
        == 1
    )
    cache = (tmp_path / "judge_cache.jsonl").read_text()
    assert len(cache.splitlines()) == 2
    assert KEY_OF_SOMEBODY not in cache
    resumed_judge = build_judge(tmp_path, server.url)  # as a resumed run has it
    assert call_reward(resumed_judge, metrics)[:2] == [1.0, 0.25]
    assert len(server.requests) == 8  # the failed one alone, twice


@pytest.mark.parametrize("stored_score", ["nan", "5.0", "-3", "abc", "1e400", "", "0.25"])
def test_what_is_no_score_in_the_cache_is_asked_for_anew(tmp_path, start_server, stored_score):
    """A stored score of 0.25 is used; what is no number from 0 to 1 is asked for again."""
    server = start_server(lambda body, call: completion_reply("<score>1</score>"))
    assert call_reward(build_judge(tmp_path, server.url), {}) == [1.0] * 3
    cache = tmp_path / "judge_cache.jsonl"
    cache.write_text(cache.read_text().replace('"answer": "1"', f'"answer": "{stored_score}"'))
    metrics = dict[str, float]()
    is_valid_score = stored_score == "0.25"
    assert (
        call_reward(build_judge(tmp_path, server.url), metrics)
        == [0.25 if is_valid_score else 1.0] * 3
    )
    # three requests have filled the cache
    assert (len(server.requests), metrics["judge/cached"]) == (
        (3, 1.0) if is_valid_score else (6, 0.0)
    )


def test_a_score_is_known_by_all_that_it_depends_on(tmp_path, start_server):
    """A cached score is for one model, limit and instruction, and serves at any address."""
    server = start_server(lambda body, call: completion_reply("<score>1</score>"))
    moved_server = start_server(lambda body, call: completion_reply("<score>1</score>"))
    expected_calls = 0
    changes: list[dict[str, Any]] = [
        {"model": "k"},
        {"max_tokens": 9},
        {"instruction": "Judge."},
    ]
    for options in ({}, *changes):
        for is_repeated in (False, True):
            call_reward(build_judge(tmp_path, **{"url": server.url, **options}), {})
            expected_calls += 0 if is_repeated else 3  # one for each answer
            assert len(server.requests) == expected_calls, options
    call_reward(build_judge(tmp_path, moved_server.url), {})
    assert not moved_server.requests, "the same judge at another address gives the same scores"


def test_options_of_a_judge_are_numbers_and_nulls_as_yaml_reads_them(tmp_path, start_server):
    """YAML reads `1e-3` as a text. No budget is the default, and may be written."""
    server = start_server(lambda body, call: completion_reply("<score>1</score>"))
    options = flow_mapping("{budget: null, wait: 1e-3, timeout: 2e1, concurrency: 2.0}")
    assert call_reward(build_judge(tmp_path, server.url, **options), {}) == [1.0] * 3


def test_a_budget_leaves_the_rest_unscored(tmp_path, start_server):
    """Two calls are allowed, and the third answer has no score."""
    server = start_server(lambda body, call: completion_reply("<score>1</score>"))
    scores = call_reward(build_judge(tmp_path, server.url, budget=2, concurrency=1), {})
    assert scores == [1.0, 1.0, None]
    assert len(server.requests) == 2


def test_a_key_that_is_refused_ends_the_run_at_once(tmp_path, start_server):
    """The key may have ended since the run began.

    No later call would be answered, so none is made.
    """
    replies: list[Reply] = [completion_reply("<score>1</score>"), (401, b"ended")]
    server = start_server(reply_in_turn(*replies))
    with pytest.raises(UserError, match=refused_key_pattern(server, "HTTP 401: ended")):
        call_reward(build_judge(tmp_path, server.url, concurrency=1), {})
    assert len(server.requests) == 2, "neither tried again, nor asked for the third answer"


def test_a_prompt_that_moderation_forbids_costs_its_own_score_alone(tmp_path, start_server):
    """HTTP 403 for one of three answers leaves the scores of the others."""
    replies: list[Reply] = [
        completion_reply("<score>1</score>"),
        (403, b"flagged"),
        completion_reply("<score>0</score>"),
    ]
    server = start_server(reply_in_turn(*replies))
    scores = call_reward(build_judge(tmp_path, server.url, concurrency=1), {})
    assert scores == [1.0, None, 0.0]
    assert len(server.requests) == 3, "a forbidden call is not tried again"


def test_a_key_that_every_call_is_forbidden_with_ends_the_run(tmp_path, start_server, monkeypatch):
    """HTTP 403 for the first call, or for two in a row, means that the key is refused."""
    monkeypatch.setattr("adora_vl.utils.openai_client._MAX_FORBIDDEN_CALLS", 2)
    forbidding_server = start_server(lambda body, call: (403, b"no"))
    with pytest.raises(UserError, match=refused_key_pattern(forbidding_server, "HTTP 403: no")):
        call_reward(build_judge(tmp_path / "at once", forbidding_server.url, concurrency=1), {})
    assert len(forbidding_server.requests) == 1
    replies: list[Reply] = [completion_reply("<score>1</score>"), (403, b"no"), (403, b"no")]
    ending_server = start_server(reply_in_turn(*replies))
    with pytest.raises(UserError, match=refused_key_pattern(ending_server, "HTTP 403: no")):
        call_reward(build_judge(tmp_path / "later", ending_server.url, concurrency=1), {})
    assert len(ending_server.requests) == 3


def refused_key_pattern(server: EndpointServer, reply: str) -> str:
    """Return a pattern of the whole error for a judge whose server refuses the key so."""
    message = re.escape(
        f"adora_reward: judge: {server.url} refuses the key in {KEY_VARIABLE} for the model "
        f"'j' ({reply} (attempt 1)); set {KEY_VARIABLE} to one that it takes"
    )
    return f"^{message}$"


def test_what_is_no_score_is_a_failure():
    """A score is a number from 0 to 1 between its tags."""
    for text in ("1", "<score>", "<score>yes</score>", "<score>1.5</score>", "<score>nan</score>"):
        with pytest.raises(EndpointError):
            parse_score(text)


def test_the_judge_is_tried_before_the_run(tmp_path, start_server):
    """The trial's error names address, model and the key's variable, and writes nothing."""
    server = start_server(lambda body, call: (401, b"no key"))
    options = {"judge": {"base_url": server.url, "model": "j"}}
    chosen = choose_rewards(["accuracy", options], output_dir=tmp_path)
    message = (
        f"{re.escape(server.url)} with the model 'j' gave no answer: HTTP 401: no key "
        f".*{KEY_VARIABLE}"
    )
    with pytest.raises(UserError, match=message):
        try_rewards(chosen, rows=[], timeout=None, state=None)
    assert not list(tmp_path.iterdir())


def try_judge(folder: Path, url: str, **options: Any) -> None:
    """Try a judge as it is tried before a run; raise a `UserError` where it gives no score."""
    judge_options = {"base_url": url, "model": "j", "wait": 0.001, **options}
    chosen = choose_rewards([{"judge": judge_options}], output_dir=folder)
    try_rewards(chosen, rows=[], timeout=None, state=None)


def test_the_trial_reads_a_right_and_a_wrong_answers_score(tmp_path, start_server, capsys):
    """A budget of 1 leaves the trial one call; equal scores of both are a warning."""
    server = start_server(
        lambda body, call: completion_reply(
            f"<score>{1 if 'is 5' in body['messages'][1]['content'] else 0}</score>"
        )
    )
    try_judge(tmp_path, server.url)
    assert len(server.requests) == 2
    assert not capsys.readouterr().err
    try_judge(tmp_path, server.url, budget=1)
    assert len(server.requests) == 3
    undecided_server = start_server(lambda body, call: completion_reply("<score>0.5</score>"))
    try_judge(tmp_path, undecided_server.url)
    assert "gives 0.5 for a right and for a wrong answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            completion_reply("0.5"),
            r"gave no score: .*'0\.5'; its reply has to end in a score such as",
        ),
        (completion_reply("<score>5</score>"), "the score 5 is not from 0 to 1"),
        (completion_reply("x" * 200), f"'{'x' * 80}'"),
        (reply_without_text("length"), "it was cut off at max_tokens, 512: raise it"),
        (completion_reply("<think>Hm", finish_reason="length"), "cut off at max_tokens"),
    ],
)
def test_a_judge_without_a_score_does_not_pass_its_trial(tmp_path, start_server, reply, message):
    """The error quotes at most 80 characters of the reply, or says that it was cut off."""
    server = start_server(lambda body, call: reply)
    with pytest.raises(UserError, match=message) as error:
        try_judge(tmp_path, server.url)
    assert "\n" not in str(error.value)
    assert len(server.requests) == 1


def test_a_judge_that_does_not_know_the_model_is_not_asked_for_its_key(tmp_path, start_server):
    """HTTP 404 makes the remedy speak of address and model."""
    server = start_server(lambda body, call: (404, b"no model j"))
    with pytest.raises(UserError, match=r"HTTP 404 .*; look at the address and at the name of"):
        try_judge(tmp_path, server.url)


def test_a_judge_that_is_not_there_is_asked_for_not_its_key(tmp_path, start_server):
    """No connection makes the remedy ask whether a server is there."""
    server = start_server(lambda body, call: completion_reply(""))
    server.close()
    with pytest.raises(UserError, match=r"ConnectError.*; is a server there\?$"):
        try_judge(tmp_path, server.url, attempts=1)


JUDGE_OPTIONS = {"base_url": "http://x/v1", "model": "j"}
WRONG_OPTIONS_AND_MESSAGE: list[tuple[Any, str]] = [
    (None, "^adora_reward.judge: {} lacks base_url, model$"),
    ({"base_url": "http://x/v1"}, "^adora_reward.judge: .* lacks model$"),
    ({**JUDGE_OPTIONS, "base_url": "x"}, "is no http address"),
    (
        {**JUDGE_OPTIONS, "modle": 1},
        "unknown option 'modle', it has base_url, .*; did you mean 'model'",
    ),
    ({**JUDGE_OPTIONS, "budget": 1.5}, "budget: 1.5 is not a whole number"),
    ({**JUDGE_OPTIONS, "attempts": 0}, "attempts: 0 is not a whole number of at"),
    ({**JUDGE_OPTIONS, "timeout": "a"}, "timeout: 'a' is not a number"),
    ({**JUDGE_OPTIONS, "timeout": math.inf}, "timeout: inf is not a finite number"),
    ({**JUDGE_OPTIONS, "budget": math.inf}, "budget: inf is not a whole number"),
    ({**JUDGE_OPTIONS, "budget": "nan"}, "budget: nan is not a whole number"),
    ({**JUDGE_OPTIONS, "attempts": True}, "attempts: True is not a whole number"),
]


def test_options_of_a_judge_that_do_not_fit_are_one_line():
    """Missing, unknown and impossible options each have their message."""
    for options, message in WRONG_OPTIONS_AND_MESSAGE:
        with pytest.raises(UserError, match=message):
            choose_rewards([{"judge": options}])


@pytest.mark.parametrize(
    "program, sampling",
    [
        ("vllm", {"top_p": 0.5, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
        ("sglang", {"top_p": 0.5, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
        ("openai", {"top_p": 0.5}),
    ],
)
def test_a_judge_is_not_sampled_by_the_defaults_of_its_model(start_server, program, sampling):
    """A request to vLLM or SGLang sets the sampling that the model's own config would change.

    A penalty would fall on the answer in the judge's prompt, which it is to repeat. OpenAI's API
    does not know these settings.
    """
    server = start_server(lambda body, call: completion_reply("5"))
    server.models = {"judge": program}
    client = ChatClient(Endpoint(server.url, "judge", body={"top_p": 0.5}))
    for question in ("2 + 3?", "1 + 4?"):
        assert client.ask([{"role": "user", "content": question}], str) == "5"
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    for request in server.requests:
        assert {name: request[name] for name in names if name in request} == sampling
