"""The request of `docs/serving.md`, as it stands there, against a server on loopback."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest

from adora_vl.prompts import SYSTEM_PROMPT
from tests.endpoint_server import completion

ROOT = Path(__file__).parents[2]


def test_the_request_of_the_page_arrives_with_its_image_and_the_trainings_prompt(tmp_path, serve):
    pytest.importorskip("openai")  # comes with vLLM
    server = serve(lambda body, call: completion("so x = 5", finish_reason="stop"))
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    PIL.Image.new("RGB", (56, 56), "red").save(tmp_path / "problem.png")
    (tmp_path / "request.py").write_text(block.replace("http://127.0.0.1:8000/v1", server.url))
    words = [sys.executable, "request.py"]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "so x = 5\n", done.stderr[-2000:]
    system, user = server.requests[0]["messages"]
    assert system["content"] == SYSTEM_PROMPT
    sent = user["content"][0]["image_url"]["url"].partition(",")[2]
    assert base64.b64decode(sent) == (tmp_path / "problem.png").read_bytes()
