"""A run whose fake vLLM servers die one after the other: it goes on, or ends with a checkpoint."""

from collections.abc import Iterator

import pytest

from adora_vl.record.metrics import METRICS_FILE, read_metrics
from adora_vl.train import main
from benchmarks.stand_in_server import GENERATE_PATHS, FakeVLLMServer
from tests.support.tiny_run import tiny_run_arguments

pytestmark = pytest.mark.slow


@pytest.fixture
def two_servers() -> Iterator[list[FakeVLLMServer]]:
    """Start two fake vLLM servers."""
    servers = [FakeVLLMServer(vocabulary=200), FakeVLLMServer(vocabulary=200)]
    yield servers
    for server in servers:
        server.close()


def two_server_arguments(folder, servers, **overrides):
    """Return the arguments of a run of four steps that samples from these servers."""
    return tiny_run_arguments(
        folder,
        **{
            "use_vllm": "true",
            "vllm_mode": "server",
            "vllm_server_base_url": ",".join(server.url for server in servers),
            "adora_weight_transfer": "file",
            "vllm_server_timeout": 0.1,
            "adora_max_drift": "null",
            "entropy_coef": 1.0,
            "max_steps": 4,
            "save_steps": 4,
            "adora_self_check": "false",
            **overrides,
        },
    )


def die_after(server: FakeVLLMServer, requests: int) -> None:
    """Let a server die after it has answered so many requests for rollouts.

    A step makes four of them, for two servers or for the one that is left.
    """
    server.post_requests.clear()

    def die_when_due(reply):
        server.dead = sum(path in GENERATE_PATHS for path, _ in server.post_requests) > requests
        return reply

    server.spoil = die_when_due


def test_one_server_goes_on_for_both_and_without_any_the_run_goes_on_later(
    tmp_path, two_servers, capfd
):
    """The servers answer by seeds alone, so all of these runs have to end with the same weights.

    One run loses a server, and one loses both: that one ends, and is resumed when they are back.
    """
    assert main(two_server_arguments(tmp_path / "whole", two_servers)) == 0
    expected = (tmp_path / "whole" / "model.safetensors").read_bytes()
    capfd.readouterr()
    die_after(two_servers[1], 2)
    assert main(two_server_arguments(tmp_path / "one", two_servers)) == 0
    # the run says once that it goes on with one server
    assert capfd.readouterr().out.count(" is left out (1 of 2 servers go on): ") == 1
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == expected
    two_servers[1].start_again()
    die_after(two_servers[0], 2)
    die_after(two_servers[1], 6)
    assert main(two_server_arguments(tmp_path / "none", two_servers)) == 1
    printed = capfd.readouterr()
    last = printed.err.strip().splitlines()[-1]
    assert last.startswith("error: step 3: no vLLM server is left; the last one: ")
    assert last.endswith(
        f"go on with --resume_from_checkpoint {tmp_path / 'none' / 'checkpoint-2'}"
    )
    # both servers live again, and no longer count towards their death
    for server in two_servers:
        server.spoil = lambda reply: reply
        server.start_again()
    assert main(two_server_arguments(tmp_path / "none", two_servers)) == 0
    assert (tmp_path / "none" / "model.safetensors").read_bytes() == expected
    assert [
        step["step"] for step in read_metrics(tmp_path / "none" / METRICS_FILE) if "reward" in step
    ] == [1, 2, 3, 4]
