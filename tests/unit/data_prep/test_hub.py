"""The hub: a small server on loopback that speaks its protocol, and the real client against it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from datasets import (
    Dataset,
    Features,
    IterableDatasetDict,
    List,
    Value,
    disable_progress_bars,
    load_dataset,
)
from datasets import Image as ImageFeature
from PIL import Image

from adora_vl.data.dataset import read_manifest, stored_rows
from tests.support.geometry3k import run_prepare_geometry3k, stderr_of_refusal
from tests.support.paths import REPOSITORY
from tests.support.user_tables import (
    EXPECTED_FIELDS_BY_ID,
    read_fields_by_id,
    run_convert,
    write_hub_parquet,
)

# commits
OLD_COMMIT = "1" * 40
NEW_COMMIT = "2" * 40
DATASET_ID = "someone/geometry3k"


@contextmanager
def hub_with_commits(commits: dict[str, dict[str, bytes]], requests: list[str]) -> Iterator[str]:
    """Serve a hub whose one data set has these commits, the last one as `main`; yield its address.

    A commit has the content of each file by name. `requests` gets the path of every request.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            requests.append(path)
            api = f"/api/datasets/{DATASET_ID}/"
            files = f"/datasets/{DATASET_ID}/resolve/"
            if path.startswith(api):
                _, revision = path.removeprefix(api).split("/", 1)
                commit = {"main": list(commits)[-1]}.get(revision, revision)
                if commit in commits:
                    return self._api(path, commit)
            if path.startswith(files):
                commit, name = path.removeprefix(files).split("/", 1)
                if name in commits.get(commit, {}):
                    body = commits[commit][name]
                    etag = f'"{hashlib.sha256(body).hexdigest()}"'
                    return self._answer(200, body, ETag=etag, X_Repo_Commit=commit)
            return self._answer(404, b"{}", X_Error_Code="RevisionNotFound")

        do_HEAD = do_GET

        def _api(self, path: str, commit: str) -> None:
            files = commits[commit]
            reply: Any = {
                "id": DATASET_ID,
                "sha": commit,
                "siblings": [{"rfilename": name} for name in files],
            }
            if "/tree/" in path:
                reply = [
                    {"type": "file", "path": n, "size": len(b), "oid": "0" * 40}
                    for n, b in files.items()
                ]
            self._answer(200, json.dumps(reply).encode(), Content_Type="application/json")

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def parquet_with_problem(tmp_path: Path, problem: str) -> bytes:
    """Return the bytes of a Parquet file in the hub's format, with one row of this problem."""
    features = Features(
        {"images": List(ImageFeature()), "problem": Value("string"), "answer": Value("string")}
    )
    picture = Image.linear_gradient("L").resize((40, 30))
    disable_progress_bars()
    path = tmp_path / "table.parquet"
    rows = [{"images": [picture], "problem": f"<image>{problem}", "answer": "2 \\sqrt { 221 }"}]
    Dataset.from_list(rows, features=features).to_parquet(path)
    return path.read_bytes()


_SCRIPT_OF_COMMANDS = """
import json, sys
from data_prep.cli import main
for line in sys.stdin:
    print(main(json.loads(line)), flush=True)
"""


class HubClient:
    """A process in which `data_prep` takes this server for the hub.

    It runs one command after the other, since starting it takes seconds.
    """

    def __init__(self, endpoint: str, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        environment = {
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT_OF_COMMANDS],
            cwd=REPOSITORY,
            env={**environment, "HF_HUB_DISABLE_XET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "stderr").open("w"),
            text=True,
        )

    def prepare(self, output: str, *options: str) -> tuple[int, str]:
        """Run a preparation from the hub; return its exit code and stderr since the start."""
        arguments = [
            "--source",
            "hub",
            "--input",
            DATASET_ID,
            "--output",
            str(self._tmp_path / output),
        ]
        command = ["geometry3k", *arguments, *options]
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).strip().isdigit():
            assert line, (self._tmp_path / "stderr").read_text()
        return int(line), (self._tmp_path / "stderr").read_text()

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture
def commits(tmp_path: Path) -> dict[str, dict[str, bytes]]:
    """Return two commits of a data set, by hash: the older one asks for x, the newer one for y."""
    name = "data/train-00000-of-00001.parquet"
    return {
        OLD_COMMIT: {name: parquet_with_problem(tmp_path, "Find x."), "README.md": b"# ours"},
        NEW_COMMIT: {name: parquet_with_problem(tmp_path, "Find y."), "README.md": b"# ours"},
    }


def test_the_manifest_has_the_full_commit_of_what_was_read(
    tmp_path: Path, commits: dict[str, Any]
) -> None:
    """A preparation from the hub reads the newest commit or `--revision`, and notes it in full.

    A pinned revision that was read before is read again when the hub is gone.
    """
    requests: list[str] = []
    with hub_with_commits(commits, requests) as endpoint:
        client = HubClient(endpoint, tmp_path)
        for output, options, commit, problem in (
            ("newest", (), NEW_COMMIT, "Find y."),
            ("pinned", ("--revision", OLD_COMMIT), OLD_COMMIT, "Find x."),
        ):
            code, error = client.prepare(output, *options)
            assert code == 0, error
            manifest = read_manifest(tmp_path / output)
            assert manifest is not None
            assert manifest["revision"] == commit
            assert manifest["input"] == DATASET_ID
            (row,) = stored_rows(tmp_path / output, "train")
            assert row["problem"] == problem
            assert row["answer"] == "2\\sqrt{221}"
        code, error = client.prepare("wrong", "--revision", "v9")
        assert code == 2
        assert error.count("error: ") == 1
        assert f"'{DATASET_ID}' at revision 'v9' cannot be loaded" in error.splitlines()[-1]
        assert not (tmp_path / "wrong").exists()
    assert not [path for path in requests if path.endswith("README.md")], (
        "more than the data was downloaded"
    )

    code, error = client.prepare("offline", "--revision", OLD_COMMIT)  # the hub is gone by now
    client.close()
    assert code == 0, error
    assert (tmp_path / "offline" / "manifest.json").read_bytes() == (
        tmp_path / "pinned" / "manifest.json"
    ).read_bytes()


def test_a_hub_id_is_streamed_at_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set of the hub is streamed at the one commit to which the revision v1 leads.

    `load` and `Api` stand in for the hub; v1 is the commit 111...
    """
    files = str(write_hub_parquet(tmp_path) / "data" / "*.parquet")
    requests: list[tuple[Any, ...]] = []

    def load(
        name: str, subset: str | None, *, revision: str, streaming: bool
    ) -> IterableDatasetDict:
        requests.append((name, subset, revision, streaming))
        stream = load_dataset(
            "parquet", data_files={"train": files, "testmini": files}, streaming=True
        )
        assert isinstance(stream, IterableDatasetDict)
        return stream

    class Api:
        def dataset_info(self, name: str, revision: str | None = None) -> Any:
            return type("Info", (), {"sha": {"v1": "1" * 40}.get(revision or "", "2" * 40)})

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    options = ("--name", "mine", "--subset", "all", "--revision", "v1", "--splits", "train=train")
    assert run_convert("someone/theirs", tmp_path / "out", *options) == 0
    assert requests == [("someone/theirs", "all", "1" * 40, True)]
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest["revision"] == "1" * 40
    assert read_fields_by_id(tmp_path / "out") == EXPECTED_FIELDS_BY_ID
    assert run_convert("someone/theirs@v1", tmp_path / "few", "--limit", "2", "--name", "mine") == 0
    assert len(read_fields_by_id(tmp_path / "few")) == 2
    assert requests[-1][2] == "1" * 40
    assert run_convert("someone/theirs", tmp_path / "no", "--splits", "test=test") == 2


def test_a_data_set_of_the_hub_without_a_table_is_one_line(tmp_path, monkeypatch, capsys):
    """A repository of the hub without Parquet files is refused in one line."""
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *names, **options: str(tmp_path / "nothing")
    )
    error = stderr_of_refusal(
        run_prepare_geometry3k("hub", "hiyouga/geometry3k", tmp_path / "out"),
        tmp_path / "out",
        capsys,
    )
    assert "has no Parquet file on the hub" in error
