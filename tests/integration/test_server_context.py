"""Servers whose context is smaller than the run's keys allow: rollouts end there, no run does."""

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest

from adora_vl.train import main
from benchmarks.stand_in_server import GENERATE_PATHS, FakeVLLMServer
from tests.support.async_servers import (
    REWARD_BY_LENGTH,
    ZOOM_TOOL_KEYS,
    server_run_arguments,
    zoom_call_ids,
)

pytestmark = pytest.mark.slow

# A third turn of a rollout with `zoom` would begin at 470 tokens or later.
SMALL_CONTEXT = 420


@pytest.fixture
def server() -> Iterator[FakeVLLMServer]:
    """Start a fake vLLM server with the small context."""
    fake_server = FakeVLLMServer(vocabulary=200, tokens=14, shortest=2, context=SMALL_CONTEXT)
    yield fake_server
    fake_server.close()


def test_a_turn_that_would_pass_a_servers_context_ends_its_rollout(tmp_path, server):
    """A rollout ends as truncated before a turn that would pass the context of a server.

    The engine of this process does so by itself; a server would refuse the turn.
    """
    server.turns = zoom_call_ids()
    (tmp_path / "mine.py").write_text(REWARD_BY_LENGTH)
    keys: dict[str, Any] = {
        **ZOOM_TOOL_KEYS,
        "max_steps": 1,
        "save_strategy": "no",
        "adora_reward": f"{tmp_path / 'mine.py'}:reward",
        "adora_rollouts": "{ahead: 0}",
    }

    assert main(server_run_arguments(tmp_path / "out", server, **keys)) == 0
    rows = pq.read_table(tmp_path / "out" / "rollouts").to_pylist()
    # A call whose answer does not fit ends the rollout without it.
    unanswered = [row for row in rows if row["calls"] == 1 and len(row["turns"]) == 1]
    assert unanswered, "no rollout came to the limit"
    assert all(row["truncated"] for row in unanswered)


def test_text_is_asked_for_no_more_tokens_than_a_server_has_room_for(tmp_path, server):
    """A prompt of text with all that it asks for has to fit a server, or it is refused."""
    server.context = 150
    keys: dict[str, Any] = {
        "config": "configs/train/smoke_text_cpu.yaml",
        "max_steps": 1,
        "save_strategy": "no",
        "max_completion_length": 100,
    }
    assert main(server_run_arguments(tmp_path / "out", server, **keys)) == 0
    bodies = [body for path, body in server.post_requests if path in GENERATE_PATHS]
    for body in bodies:
        (prompt,) = body["prompt"]
        assert body["max_tokens"] == min(100, 150 - len(prompt))
    assert any(body["max_tokens"] < 100 for body in bodies), "no prompt came to the limit"
