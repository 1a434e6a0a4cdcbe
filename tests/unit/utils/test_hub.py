"""A hub that cannot be reached, hangs or is broken is asked once and costs seconds only.

The libraries alone would ask for each file, and wait for minutes.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from huggingface_hub import constants, get_session

from adora_vl.config.command import parse_command
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.evals.inference.engines import build_engine
from adora_vl.evals.inference.requests import AnswerEngineSettings
from adora_vl.models import load
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.planning.plan import make_plan
from adora_vl.prepare import prepare
from adora_vl.train import build_trainer, main
from adora_vl.trainer import AdoraGRPOTrainer
from adora_vl.utils import hub
from adora_vl.utils.errors import UserError
from data_prep.cli import main as data_prep
from eval.command import main as evaluate
from eval.mathvista import BENCHMARK as MATHVISTA
from tests.support.commands import parse
from tests.support.hub_cache import copy_into_hub_cache
from tests.support.tiny_run import tiny_run_arguments

CPU_RUN_WITHOUT_DATA = [
    "--use_cpu",
    "true",
    "--bf16",
    "false",
    "--output_dir",
    "nowhere",
    "--dataset_name",
    "nowhere",
]
Answer = Callable[[socket.socket], None]
dripped_bytes: list[int] = []  # an entry for each byte


def hang(connection: socket.socket) -> None:
    """Read a request and never answer."""
    connection.recv(1)
    while connection.recv(4096):
        pass


def drip_bytes(connection: socket.socket) -> None:
    """Send a byte every 20 ms, without end."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"H")
            dripped_bytes.append(1)
            time.sleep(0.02)


def close_at_once(connection: socket.socket) -> None:
    connection.close()


def answer_unavailable(connection: socket.socket) -> None:
    """Answer a request with HTTP 503."""
    connection.recv(4096)
    connection.sendall(
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
    connection.close()


def answer_well(connection: socket.socket) -> None:
    """Answer a request with HTTP 200."""
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    connection.close()


@contextlib.contextmanager
def serve_connections(answer: Answer) -> Iterator[tuple[str, list[object]]]:
    """Serve on loopback, each connection by `answer`.

    Yield the address, and a list that gets an entry for each connection.
    """
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", connections


@pytest.fixture
def use_address_as_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that makes an address the hub, as for a process that has just started.

    The hub is waited for one second instead of five.
    """

    def set_hub(address: str) -> None:
        """Make this address the hub, which is not known to answer or not."""
        hub.hub_unavailable_reason.cache_clear()
        monkeypatch.setattr(constants, "ENDPOINT", address)
        # the library makes the template of a file's address when it is imported
        _, _, file_path = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{")
        template = f"{address}/{{{file_path}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    monkeypatch.setattr(hub, "_HUB_TIMEOUT_S", 1.0)
    get_session()  # the first one reads certificates, which takes a busy machine long
    yield set_hub
    hub.hub_unavailable_reason.cache_clear()


def test_a_hub_that_does_not_work_is_asked_once(use_address_as_hub: Callable[[str], None]) -> None:
    """Three loads of a model that is nowhere connect at most once, and each says so."""
    for answer in (hang, drip_bytes, close_at_once, answer_unavailable):
        dripped_bytes.clear()
        with serve_connections(answer) as (address, connections):
            use_address_as_hub(address)
            for _ in range(3):
                with pytest.raises(
                    UserError,
                    match="^model_name_or_path: 'nobody/nothing' is neither a model folder",
                ):
                    load.load_config("nobody/nothing")
            assert len(connections) <= 1, answer
            # about 50 bytes come in the second that the hub is waited for
            assert len(dripped_bytes) < 500, "an HTTP client's time limit is for each byte"


def test_a_hub_that_works_is_used(use_address_as_hub: Callable[[str], None]) -> None:
    """A hub that answers is not passed over, and nothing is said of a local copy."""
    with serve_connections(answer_well) as (address, _):
        use_address_as_hub(address)
        assert not hub.hub_unavailable_reason()
        assert not hub.uses_local_files_only("nobody/nothing")
        assert not hub.notes_on_local_copy("nobody/nothing")


def test_a_folder_and_an_offline_machine_ask_nobody(use_address_as_hub, monkeypatch, tmp_path):
    """Local files are used for a folder, or with HF_HUB_OFFLINE, and no hub is asked."""
    with serve_connections(answer_well) as (address, connections):
        use_address_as_hub(address)
        assert hub.uses_local_files_only(str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert hub.uses_local_files_only("nobody/nothing")
        assert not connections


def test_a_dry_run_of_a_model_on_a_hub_that_hangs(
    use_address_as_hub: Callable[[str], None], capsys: object
) -> None:
    """A dry run asks a hub that hangs at most once for config, processor and tokenizer together.

    A config that ships here stands in for the model's.
    """
    with serve_connections(hang) as (address, connections):
        use_address_as_hub(address)
        assert main(
            [
                *CPU_RUN_WITHOUT_DATA,
                "--dry-run",
                "--model_name_or_path",
                "Qwen/Qwen2.5-VL-3B-Instruct",
            ]
        ) in (
            0,
            1,
        )
        assert len(connections) <= 1


@pytest.fixture
def cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Keep the tiny model as the hub's library keeps one that it has loaded; return its name."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return copy_into_hub_cache("somebody/tiny", PRETRAINED_FOLDER, main="0" * 40)


def test_the_revision_that_is_named_is_the_one_that_is_loaded(cached_model: str) -> None:
    """Config and processor are loaded from the revision that is named.

    `v1` is an older commit, with two layers more and another chat template.
    """
    model_folder = Path(constants.HF_HUB_CACHE) / "models--somebody--tiny"
    older_folder = shutil.copytree(
        model_folder / "snapshots" / ("0" * 40), model_folder / "snapshots" / ("1" * 40)
    )
    (model_folder / "refs" / "v1").write_text("1" * 40)
    (older_folder / "chat_template.jinja").write_text("older")
    config = json.loads((older_folder / "config.json").read_text())
    config["vision_config"]["depth"] += 2
    (older_folder / "config.json").write_text(json.dumps(config))
    newest_config = load.load_config(cached_model, None)
    older_config = load.load_config(cached_model, "v1")
    assert older_config.vision_config.depth == newest_config.vision_config.depth + 2
    assert load.load_processor(cached_model, "v1").chat_template == "older"
    assert load.load_processor(cached_model).chat_template != "older"


def test_every_way_into_a_run_asks_for_the_revision_of_its_processor(monkeypatch, tmp_path):
    """The command, its dry run and a trainer built in Python load the processor of `v1`."""
    revisions: list[str | None] = []

    def note_revision(name: str, revision: str | None = None) -> None:
        revisions.append(revision)
        raise UserError("not loaded here")

    monkeypatch.setattr("adora_vl.preflight.check_prompts.load_processor", note_revision)
    arguments = tiny_run_arguments(
        tmp_path / "run", model_name_or_path=PRETRAINED_FOLDER, model_revision="v1"
    )
    config = parse(arguments)[1]
    config.model_init_kwargs = {"revision": "v1"}
    rows = Dataset.from_list([{"prompt": "Say so."}] * 4)
    entry_points: list[Callable[[], object]] = [
        lambda: prepare(parse_command(arguments)),
        lambda: make_plan(parse_command(arguments), DryRunOptions()),
        lambda: AdoraGRPOTrainer(str(PRETRAINED_FOLDER), "accuracy", config, rows),
    ]
    for enter in entry_points:
        with pytest.raises(UserError, match="not loaded here"):
            enter()
    assert revisions == ["v1"] * 3


@pytest.mark.parametrize("answer", [hang, answer_unavailable], ids=lambda answer: answer.__name__)
def test_a_run_loads_a_model_that_is_here_while_the_hub_does_not_work(
    answer: Answer,
    use_address_as_hub: Callable[[str], None],
    cached_model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run and an evaluation take the cached copy, and ask the hub at most once.

    TRL, PEFT and the engines load it by its name on the hub, and would each ask for every file.
    """
    with serve_connections(answer) as (address, connections):
        use_address_as_hub(address)
        run = prepare(
            parse_command(tiny_run_arguments(tmp_path / "run", model_name_or_path=cached_model))
        )
        assert (
            f"{cached_model}: {address} does not answer; its copy on this machine is used"
            in capsys.readouterr().out
        )
        trainer = build_trainer(run)
        assert trainer.model.config._name_or_path == cached_model
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        build_engine(AnswerEngineSettings(model=cached_model, engine="transformers"))
        assert len(connections) <= 1


@pytest.mark.parametrize("answer", [hang, answer_unavailable], ids=lambda answer: answer.__name__)
def test_data_of_a_hub_that_does_not_work_is_one_line(
    answer: Answer,
    use_address_as_hub: Callable[[str], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every command that reads a data set of the hub says that the hub does not answer."""
    output = ["--output", str(tmp_path / "out")]
    conversion = [
        "convert",
        "--input",
        "somebody/problems",
        "--columns",
        "problem=question",
        "answer=label",
        *output,
    ]
    commands: list[Callable[[], int]] = [
        lambda: data_prep(["geometry3k", "--source", "hub", *output]),
        lambda: data_prep(conversion),
        lambda: evaluate(
            MATHVISTA,
            ["infer", "--model", str(PRETRAINED_FOLDER), "--data", "somebody/mathvista", *output],
        ),
    ]
    with serve_connections(answer) as (address, connections):
        for command in commands:
            use_address_as_hub(address)
            assert command() == 2
            stderr = capsys.readouterr().err
            assert stderr.startswith("error: ")
            assert stderr.count("\n") == 1
            assert f"{address} does not answer" in stderr
            assert len(connections) <= 1
            assert not (tmp_path / "out").exists()
            connections.clear()
