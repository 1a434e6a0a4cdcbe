"""A hub that cannot be reached, hangs or is broken costs seconds and is asked once, whatever the library would do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from huggingface_hub import constants, get_session

from adora_vl import hub
from adora_vl.dry_run.command import dry_run
from adora_vl.errors import UserError
from adora_vl.models import load

CPU = ["--use_cpu", "true", "--bf16", "false", "--output_dir", "nowhere", "--dataset_name", "nowhere"]
Answer = Callable[[socket.socket], None]


def hangs(connection: socket.socket) -> None:
    connection.recv(1)
    while connection.recv(4096):
        pass


def drips(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"H")
            time.sleep(0.02)


def closes(connection: socket.socket) -> None:
    connection.close()


def is_broken(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    connection.close()


def works(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    connection.close()


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[object]]]:
    """A server on loopback: its address, and a list that gets an entry for each connection."""
    asked: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    asked.append(connection)
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes an address the hub, which waits a second instead of five."""

    def use(address: str) -> None:
        hub.hub_answers.cache_clear()
        monkeypatch.setattr(constants, "ENDPOINT", address)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_HUB_SECONDS", 1.0)
    get_session()  # the first one reads certificates, which takes a busy machine long
    yield use
    hub.hub_answers.cache_clear()


@pytest.mark.parametrize("answer", [hangs, drips, closes, is_broken], ids=lambda answer: answer.__name__)
def test_a_hub_that_does_not_work_is_asked_once(answer: Answer, endpoint: Callable[[str], None]) -> None:
    with serving(answer) as (address, asked):
        endpoint(address)
        for _ in range(3):
            with pytest.raises(UserError, match="^model_name_or_path: 'nobody/nothing' is neither a model folder here"):
                load.load_config("nobody/nothing")
        assert len(asked) <= 1


def test_a_hub_that_works_is_used(endpoint: Callable[[str], None]) -> None:
    with serving(works) as (address, _):
        endpoint(address)
        assert hub.hub_answers() and not hub.only_here("nobody/nothing")


def test_a_folder_and_an_offline_machine_ask_nobody(
    endpoint: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    with serving(works) as (address, asked):
        endpoint(address)
        assert hub.only_here(str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert hub.only_here("nobody/nothing") and not asked


def test_a_dry_run_of_a_model_on_a_hub_that_hangs(endpoint: Callable[[str], None], capsys: object) -> None:
    """One question for config, processor and tokenizer together; what ships here stands in for the config."""
    with serving(hangs) as (address, asked):
        endpoint(address)
        assert dry_run([*CPU, "--dry-run", "--model_name_or_path", "Qwen/Qwen2.5-VL-3B-Instruct"]) in (0, 1)
        assert len(asked) <= 1
