"""Package indexes for pip on this machine, with wheels that are empty.

One server is the proxy in pip's configuration, so it gets the requests for every host, and answers
as each of the indexes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Wheel:
    """A wheel's file name and its bytes."""

    name: str
    content: bytes

    @property
    def project(self) -> str:
        """The normalised name of the wheel's project."""
        return normalise_project_name(self.name.split("-")[0])


def normalise_project_name(project: str) -> str:
    """Return a project's name as an index writes it (PEP 503): "A_b.C" is "a-b-c"."""
    return re.sub(r"[-_.]+", "-", project).lower()


def _zip_files(files: Mapping[str, bytes]) -> bytes:
    """Return a zip archive with these files, by path."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for path, content in files.items():
            opened.writestr(path, content)
    return archive.getvalue()


def empty_wheel(
    project: str,
    version: str,
    *,
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
    modules: Mapping[str, str] | None = None,
) -> Wheel:
    """Return a wheel that pip can install.

    Args:
        project: the name of the project.
        version: its version.
        tag: the platforms on which pip takes it.
        requires: what it requires, such as "torch>=2".
        modules: the source of each module in it, by name; by default it has none.
    """
    name = re.sub(r"[-_.]+", "_", project)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {need}\n" for need in requires)
    files = {
        **{f"{module}/__init__.py": source.encode() for module, source in (modules or {}).items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
        f"{needs}".encode(),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        f"Tag: {tag}\n".encode(),
    }
    lines = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
    return Wheel(f"{name}-{version}-{tag}.whl", _zip_files(files))


def repack_installed_wheel(project: str) -> Wheel:
    """Return a wheel made of the files of a pure Python package that is installed here."""
    installed = distribution(project)
    files = {
        str(path): path.read_binary()
        for path in installed.files or []
        if ".." not in path.parts
        and path.suffix != ".pyc"
        and path.name not in ("INSTALLER", "REQUESTED")
    }
    return Wheel(f"{installed.name}-{installed.version}-py3-none-any.whl", _zip_files(files))


@dataclass
class PackageIndexes:
    """Indexes of several hosts behind one proxy, which listens on `port` inside a `with` block.

    `hosts` has the wheels of each host. pip asks for `http://HOST/simple` through the proxy.
    """

    hosts: dict[str, list[Wheel]]
    down: set[str] = field(default_factory=set)  # the proxy answers that it cannot reach them
    silent: set[str] = field(default_factory=set)  # they take the request and never answer
    requests: list[tuple[str, str]] = field(default_factory=list)  # host and path of every request

    def __enter__(self) -> PackageIndexes:
        """Start the proxy, and return the indexes."""
        self._ended = threading.Event()
        indexes = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                indexes._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer with a wheel, with the links to a project's wheels, or with an error."""
        url = urlsplit(request.path)
        host = url.hostname or ""
        path = unquote(url.path)
        self.requests.append((host, path))
        if host in self.silent:
            self._ended.wait()
            return
        wheels = self.hosts.get(host, [])
        folder, _, last = path.strip("/").rpartition("/")
        if folder == "files":
            contents = [wheel.content for wheel in wheels if wheel.name == last]
            kind = "application/octet-stream"
        else:
            links = [
                f'<a href="/files/{wheel.name}">{wheel.name}</a>'
                for wheel in wheels
                if wheel.project == last
            ]
            contents = ["".join(links).encode()] if links else []
            kind = "text/html"
        if host in self.down:
            status = 502
        elif contents:
            status = 200
        else:
            status = 404
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.end_headers()
        if contents and host not in self.down:
            request.wfile.write(contents[0])

    def wheels_taken(self, host: str) -> set[str]:
        """Return the projects of which a wheel was downloaded from `host`."""
        files = [path for at, path in self.requests if at == host and "/files/" in path]
        return {Wheel(path.rpartition("/")[2], b"").project for path in files}

    def projects_asked(self, host: str) -> set[str]:
        """Return the projects whose list of wheels was read at `host`."""
        return {
            path.strip("/").rpartition("/")[2]
            for at, path in self.requests
            if at == host and "/files/" not in path
        }
