"""A run that samples on several vLLM servers, which two fake servers play.

The tests read which server got which requests, which one is left out, and which weights each has
got.
"""

import copy
import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerState

from adora_vl.builtin.processor import build_processor
from adora_vl.builtin.tiny_vl import build_model
from adora_vl.config.blocks import RolloutOptions
from adora_vl.data.context_limit import server_context_length
from adora_vl.models.families import freeze
from adora_vl.rollout.engine import AdoraVLLMGeneration
from adora_vl.rollout.rollouts import SamplingRequest
from adora_vl.rollout.samplers import AsyncServerSampler
from adora_vl.rollout.server_client import Timeouts, connect
from adora_vl.rollout.server_group import ServerGroup
from adora_vl.rollout.server_pool import ServerPool
from adora_vl.rollout.weight_files import WeightFiles
from adora_vl.utils.errors import EngineError, NoServerError, RolloutError, UserError
from benchmarks.stand_in_server import GENERATE_PATHS, FakeVLLMServer
from tests.support.sampling_requests import sampling_requests
from tests.support.stand_ins import settings_of_engine
from tests.support.step_context import step_context

IMAGE = 290  # the id of the image token
VOCABULARY = 300  # of the fake servers, and of the policy
SAMPLING_ATTRIBUTES: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "logprobs": 0,
    "max_completion_length": 8,
    "structured_outputs_regex": None,
    "generation_kwargs": {"logit_bias": {IMAGE: -100.0}},
}


@pytest.fixture
def servers() -> Iterator[list[FakeVLLMServer]]:
    """Start two fake servers, whose answers depend on the seed of a request alone."""
    all_servers = [FakeVLLMServer(), FakeVLLMServer()]
    yield all_servers
    for server in all_servers:
        server.close()


def engine_with_servers(
    servers: list[FakeVLLMServer],
    folder: Path,
    model: Any = None,
    patience_s: float = 0.0,
    answer_s: float = 60.0,
) -> Any:
    """Return the engine of a run with these servers, to which weights are sent as files.

    Args:
        servers: the servers.
        folder: where the files of weights are written.
        model: the policy; by default a fake that no test sends to the servers.
        patience_s: seconds to wait for servers at the start.
        answer_s: seconds in which a server has to answer.
    """
    if model is None:
        text_config = SimpleNamespace(vocab_size=VOCABULARY)
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text_config))
    engine: Any = object.__new__(AdoraVLLMGeneration)
    accelerator = Accelerator(cpu=True)
    engine.__dict__.update(
        SAMPLING_ATTRIBUTES,
        mode="server",
        enable_sleep_mode=False,
        model=model,
        accelerator=accelerator,
    )
    engine.__dict__.update(
        _engine_has_all_parameters=False, _count_seconds=nullcontext, image_token_id=IMAGE
    )
    engine.__dict__.update(_config_generation_kwargs={}, group_port=0, server_timeout=patience_s)
    engine.server_base_url = ",".join(server.url for server in servers)
    engine.settings = settings_of_engine(
        weight_folder=str(folder), answer_timeout_s=answer_s, output_dir=str(folder)
    )
    engine.processing_class = SimpleNamespace(image_token_id=IMAGE)
    engine._dist = SimpleNamespace(gather_params=lambda _: nullcontext())
    engine._connect(folder)
    return engine


def requests_of_groups(groups: int, *, grouped: bool = True) -> list[SamplingRequest]:
    """Return requests for `groups` groups of two rollouts; every second group has an image.

    Prompts are [0, 7], [1, IMAGE, IMAGE, 7], [2, 7] and so on. `grouped`: whether the two rollouts
    of a group may be one request of a server.
    """
    prompts = []
    images: list[list[Image.Image] | None] = []
    for group in range(groups):
        if group % 2 == 0:
            prompts += [[group, 7]] * 2
            images += [None, None]
        else:
            picture = [Image.new("RGB", (28, 56), (group, 0, 0))]
            prompts += [[group, IMAGE, IMAGE, 7]] * 2
            images += [picture, picture]
    return sampling_requests(prompts, images, generations=2, grouped=grouped)


def sample_on_servers(engine: Any, requests: list[SamplingRequest]) -> Any:
    """Return the results of these requests, in their order."""
    return engine.server_group.sample(requests, engine.sampling_settings)


def received_requests(server: FakeVLLMServer) -> list[dict[str, Any]]:
    """Return the sampling parameters of each request that a server has got, such as "n" and "seed".

    A prompt with an image is sent to another path, where they stand one level deeper.
    """
    return [
        body.get("sampling_params", body)
        for path, body in server.post_requests
        if path in GENERATE_PATHS
    ]


def test_groups_are_divided_as_wholes_and_answers_come_back_in_order(servers, tmp_path):
    """Two servers share five groups, and the seeds decide the answers, whichever server samples.

    The rollouts of a group may be one request or several. An image is sent to a server once.
    """
    engine = engine_with_servers(servers, tmp_path / "w")
    requests = requests_of_groups(5)
    results = sample_on_servers(engine, requests)

    # Five groups are five requests, of two rollouts each.
    assert [len(received_requests(server)) for server in servers] == [3, 2]
    assert {sent["n"] for server in servers for sent in received_requests(server)} == {2}
    assert len({tuple(result.tokens) for result in results}) == 10
    assert all(len(result.logps) == 8 for result in results)
    engine_with_one_server = engine_with_servers(servers[:1], tmp_path / "w")
    assert sample_on_servers(engine_with_one_server, requests) == results, (
        "whoever is asked, the seeds decide"
    )
    # The same ten rollouts as single requests, of which each server gets five.
    assert sample_on_servers(engine, requests_of_groups(5, grouped=False)) == results
    assert {sent["n"] for sent in received_requests(servers[0])[-5:]} == {1}
    servers[0].post_requests.clear()
    assert (
        sample_on_servers(engine_with_one_server, requests_of_groups(5, grouped=False)) == results
    )
    # A server renders an image for us first; rollouts then refer to what it has rendered.
    image_paths = [path for path, _ in servers[0].post_requests if path.endswith("/render")]
    assert len(image_paths) == 2, "each image once, although both rollouts that see it are requests"


def reply_spoilers() -> dict[str, Any]:
    """Return functions, by what they do, that turn a server's reply into one that is no answer.

    A reply has a choice for each rollout of its request.
    """

    def in_each_choice(change: Callable[[dict[str, Any]], None]) -> Any:
        """Return a function that makes this change in every choice of a reply."""

        def spoil(reply: dict[str, Any]) -> dict[str, Any]:
            for choice in reply["choices"]:
                change(choice)
            return reply

        return spoil

    def remove_tokens(choice: dict[str, Any]) -> None:
        choice["token_ids"] = []

    def double_length(choice: dict[str, Any]) -> None:
        choice["token_ids"] = choice["token_ids"] * 2
        for column in choice["logprobs"].values():
            column *= 2

    def replace_last_token(choice: dict[str, Any], token: int) -> None:
        choice["token_ids"][-1] = token
        # The reply to a prompt without an image names tokens in one list, the other in
        # dictionaries.
        logprobs = choice["logprobs"]
        if "tokens" in logprobs:
            logprobs["tokens"][-1] = f"token_id:{token}"
        else:
            logprobs["content"][-1]["token"] = f"token_id:{token}"

    above_vocabulary = partial(replace_last_token, token=VOCABULARY)
    below_zero = partial(replace_last_token, token=-1)
    return {
        "more tokens than were asked for": in_each_choice(double_length),
        "a token that the policy does not have": in_each_choice(above_vocabulary),
        "a token below zero": in_each_choice(below_zero),
        "fewer rollouts than were asked for": lambda reply: {"choices": reply["choices"][:1]},
        "no tokens": in_each_choice(remove_tokens),
        "no JSON of ours": lambda reply: {"detail": "what?"},
    }


def test_requests_that_a_server_does_not_answer_rightly_go_to_the_other_one(
    servers, tmp_path, capsys, subtests
):
    """A dead server, or one whose reply is no answer, is left out with one line.

    The results are the same, since the seeds of requests decide them.
    """
    requests = requests_of_groups(5)
    expected = sample_on_servers(engine_with_servers(servers, tmp_path / "w"), requests)
    healthy, broken = servers
    for name, spoil in {"dead": None, **reply_spoilers()}.items():
        with subtests.test(name):
            engine = engine_with_servers(servers, tmp_path / "w")
            # A server without a way to spoil its replies is dead: it does not reply at all.
            if spoil is None:
                broken.dead = True
            else:
                broken.spoil = spoil
            assert sample_on_servers(engine, requests) == expected
            (notice,) = capsys.readouterr().out.strip().splitlines()
            assert notice.startswith(f"Server {broken.url} is left out (1 of 2 servers go on)")
            servers_in_use = engine.server_group.pool.servers_in_use
            assert [server.address for server in servers_in_use] == [healthy.url]
            broken.dead = False
            broken.spoil = lambda reply: reply


def test_a_server_that_was_started_again_after_the_sync_is_not_believed(
    servers, tmp_path, capsys, subtests
):
    """A restarted server has other weights, so its answers are sampled again by the other one.

    It is back in use with the next sync. Without another server the run ends.
    """
    requests = requests_of_groups(5)
    steady_server, restarted_server = servers

    def start_again_meanwhile(reply: dict[str, Any]) -> dict[str, Any]:
        restarted_server.start_again()
        return reply

    for moment in ("before it is asked", "while it samples"):
        with subtests.test(moment):
            engine = engine_with_servers(servers, tmp_path / "w", small_policy())
            engine.sync_weights()
            expected = sample_on_servers(engine, requests)
            earlier_count = len(received_requests(steady_server))
            if moment == "while it samples":
                restarted_server.spoil = start_again_meanwhile
            else:
                restarted_server.start_again()
            assert sample_on_servers(engine, requests) == expected
            assert len(received_requests(steady_server)) - earlier_count == 5, (
                "all five groups, since the restarted one has other weights"
            )
            output = capsys.readouterr().out
            assert output.count("is left out (1 of 2 servers go on)") == 1
            assert "it was started again" in output
            restarted_server.spoil = lambda reply: reply
            engine.sync_weights()
            assert len(engine.server_group.pool.servers_in_use) == 2, (
                "with the weights of the next sync"
            )
    engine_with_one_server = engine_with_servers([restarted_server], tmp_path / "w", small_policy())
    engine_with_one_server.sync_weights()
    restarted_server.start_again()
    with pytest.raises(
        NoServerError, match="no vLLM server is left; the last one: .*it was started again"
    ):
        sample_on_servers(engine_with_one_server, requests)


def test_with_no_server_left_all_ranks_hear_it(servers, tmp_path, monkeypatch):
    """The first rank alone speaks with the servers. The others get its error by a broadcast."""
    engine = engine_with_servers(servers, tmp_path / "w", small_policy())
    for server in servers:
        server.dead = True
    for use_servers in (
        lambda: sample_on_servers(engine, requests_of_groups(2)),
        engine.sync_weights,
    ):
        with pytest.raises(NoServerError, match="no vLLM server is left; the last one"):
            use_servers()
    # Another rank has no pool, and hears of the failure by the broadcast.
    group_of_other_rank = ServerGroup(Accelerator(cpu=True), engine._place_features)
    # The first rank has no result, and an error, which the broadcast copies as pickle does.
    outcome = [None, copy.copy(NoServerError("no vLLM server is left"))]

    def broadcast_outcome(objects: list[Any], from_process: int) -> None:
        """Stand in for accelerate's collective call, which fills the list that it gets."""
        objects[:] = outcome

    monkeypatch.setattr("adora_vl.rollout.server_group.broadcast_object_list", broadcast_outcome)
    took_part = []
    with pytest.raises(NoServerError, match="^no vLLM server is left$"):
        group_of_other_rank.on_first_rank(
            lambda pool: None, on_other_ranks=lambda: took_part.append(True)
        )
    assert took_part == [True]


def small_policy() -> Any:
    """Return a small policy, whose vision tower is frozen and whose projector is trained."""
    model = build_model(build_processor(["Find x."]).tokenizer)
    model.resize_token_embeddings(VOCABULARY)
    freeze(model, ["vision_tower"])
    return model


def test_a_server_that_was_started_again_gets_all_weights_and_else_only_what_can_change(
    servers, tmp_path, capsys
):
    """After its restart a server has lost all weights, and the next sync notices that.

    There are two fake servers. Each has in `weights` the names of what every sync has sent it, and
    `start_again` empties that.
    """
    model = small_policy()
    everything = sorted(name for name, _ in model.named_parameters())
    # The vision tower is frozen, apart from its merger, which makes its features into tokens.
    trained = [name for name in everything if "visual" not in name or "merger" in name]
    engine = engine_with_servers(servers, tmp_path / "w", model)
    engine.sync_weights()
    engine.sync_weights()

    assert len(trained) < len(everything)
    # The folder through which the weights go is deleted after each sync.
    assert not (tmp_path / "w").exists()
    assert [server.weights for server in servers] == [[everything, trained]] * 2
    assert engine.bytes_sent == sum(dict(model.named_parameters())[name].nbytes for name in trained)
    servers[0].start_again()  # between two syncs, so that nothing has failed
    engine.sync_weights()
    # All servers read the same files, so the other one gets everything once more.
    assert servers[0].weights == [everything]
    assert servers[1].weights[2:] == [everything]
    servers[1].dead = True
    engine.sync_weights()
    assert servers[0].weights == [everything, trained]
    servers[1].start_again()
    engine.sync_weights()
    assert servers[1].weights == [everything]
    assert "is back." in capsys.readouterr().out


def engine_with_lora_servers(servers: list[FakeVLLMServer], folder: Path) -> AdoraVLLMGeneration:
    """Return an engine whose policy has an adapter of rank 4, and whose servers take rank 8.

    `folder`: where adapters are written for the servers.
    """
    model = get_peft_model(
        small_policy(), LoraConfig(r=4, target_modules=r".*language_model.*q_proj")
    )
    for server in servers:
        server.lora = {"max_lora_rank": 8}
    return engine_with_servers(servers, folder, model)


def test_servers_with_lora_get_the_adapter_alone_and_answer_by_no_other_one(
    servers, tmp_path, capsys
):
    """Servers with LoRA get the adapter without the base model, and sample by the newest one.

    Each sync sends it under a new name, the name of its folder, and requests ask for that name.
    """
    engine = engine_with_lora_servers(servers, tmp_path / "w")

    assert (
        "serves stand-in, to which the adapter goes alone; it has to be " in capsys.readouterr().out
    )
    for _ in range(2):
        engine.sync_weights()
        (folder,) = (tmp_path / "w").iterdir()  # it stays: vLLM may read it once more
        assert [server.served for server in servers] == [["stand-in", folder.name]] * 2
        sample_on_servers(engine, requests_of_groups(2))
        requested_models = [
            [body["model"] for path, body in server.post_requests if path in GENERATE_PATHS]
            for server in servers
        ]
        assert {models[-1] for models in requested_models} == {folder.name}
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8, (
        "a rank that vLLM has kernels for"
    )
    assert servers[0].weights[0] == sorted(load_file(folder / "adapter_model.safetensors"))
    assert all("lora_" in name for name in servers[0].weights[0])
    # Three layers with two matrices of 4 x 96 numbers each, of four bytes.
    assert engine.bytes_sent == 3 * 2 * (4 * 96) * 4
    engine.server_group.weight_files = None
    assert not (tmp_path / "w").exists()


def test_a_server_with_lora_that_was_started_again_has_no_adapter_until_the_next_sync(
    servers, tmp_path, capsys
):
    """A server that has lost its adapter by a restart is used again from the next sync on.

    The other one samples meanwhile. If it was started again without LoRA, the sync says with which
    options it has to be started.
    """
    engine = engine_with_lora_servers(servers, tmp_path / "w")
    requests = requests_of_groups(2)
    engine.sync_weights()
    results = sample_on_servers(engine, requests)
    capsys.readouterr()

    servers[1].start_again()
    assert sample_on_servers(engine, requests) == results
    assert "it was started again" in capsys.readouterr().out
    engine.sync_weights()
    assert len(engine.server_group.pool.servers_in_use) == 2
    assert sample_on_servers(engine, requests) == results

    servers[1].start_again()
    servers[1].lora = None
    engine.sync_weights()
    assert (
        "start it with --enable-lora and --max-lora-rank 8 and VLLM_ALLOW"
        in capsys.readouterr().out
    )
    engine.server_group.weight_files = None
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    ("lora", "targets", "four_bit", "remedy"),
    [
        ({"max_lora_rank": 1}, "language_model.*q_proj", False, "start it with --max-lora-rank 8"),
        ({"max_lora_rank": 8}, "up_proj", False, "start it with --enable-tower-connector-lora"),
        (
            {"max_lora_rank": 8, "target_modules": ["k_proj"]},
            "language_model.*q_proj",
            False,
            "no --lora-target-mod",
        ),
        (
            {"max_lora_rank": 8},
            "language_model.*q_proj",
            True,
            "serves stand-in; start it with .*, which the po",
        ),
        (None, "language_model.*q_proj", True, "start it with --enable-lora and --max-lora-rank 8"),
    ],
)
def test_a_server_that_would_not_serve_the_whole_adapter_is_refused_at_the_start(
    servers, tmp_path, monkeypatch, lora, targets, four_bit, remedy
):
    """The error names the option with which the server would serve all of the adapter.

    `lora`: the server's options (None: it was started without LoRA). `targets`: the modules that
    the adapter changes. `four_bit`: whether the policy has 4-bit weights. `remedy`: words of the
    error.
    """
    monkeypatch.setattr(AdoraVLLMGeneration, "four_bit", four_bit)
    model = get_peft_model(small_policy(), LoraConfig(r=4, target_modules=f".*{targets}"))
    for server in servers:
        server.lora = lora
    message = f"vllm_server_base_url: {servers[0].url}: it .*{remedy}"
    with pytest.raises(EngineError, match=message):
        engine_with_servers(servers, tmp_path / "w", model)


def sampler_ahead(
    servers: list[FakeVLLMServer], folder: Path, state: TrainerState
) -> AsyncServerSampler:
    """Return the sampler of a run two steps ahead, which writes the weights below `folder`.

    `state`: the trainer's, whose `global_step` is the step that the sampler works for.
    """
    context: Any = step_context(state=state, adora_rollouts=RolloutOptions(ahead=2))
    policy: Any = SimpleNamespace(cache=None)
    return AsyncServerSampler(context, policy, engine_with_servers(servers, folder, small_policy()))


def test_what_servers_are_given_ahead_is_done_in_order_and_leaves_nothing(
    servers, tmp_path, monkeypatch, capsys
):
    """Jobs of later steps wait in a queue while servers sample, and leave no files behind.

    Syncs and requests are done in order; the weights of a sync wait as files. A server that was
    started again meanwhile is left out until all weights are written once more.
    """
    state = TrainerState()
    ahead = sampler_ahead(servers, tmp_path / "w", state)
    first_request_came = Event()
    may_sample = Event()
    requests = requests_of_groups(2)
    stock_sample = ServerPool.sample

    def sample_when_allowed(*arguments: Any) -> Any:
        """Hold the servers at the first request until the test lets them go on."""
        first_request_came.set()
        assert may_sample.wait(60)
        return stock_sample(*arguments)

    monkeypatch.setattr(ServerPool, "sample", sample_when_allowed)
    # Three steps queue their weights and requests, while the servers are held at the first request.
    pending = []
    for step in range(3):
        state.global_step = step
        ahead.sync_weights()
        ahead.sync_weights()  # the second call in a step does nothing
        pending.append(ahead.submit(requests))
    assert first_request_came.wait(60)
    assert len(servers[0].weights) == 1, "the servers sample by the first weights"
    assert len(ahead._stack_by_weight_folder) == 2, "those of two steps wait"
    servers[1].start_again()
    may_sample.set()
    results = [samples.join() for samples in pending]
    assert results[0] == results[1] == results[2] == pending[2].join()
    assert [samples.step for samples in pending] == [0, 1, 2]
    assert not ahead._stack_by_weight_folder
    assert not (tmp_path / "w").exists()
    assert set(ahead.pop_seconds_waited()) == {"trainer", "servers"}
    # The server that was started again gets all weights with the next sync.
    everything = servers[0].weights[0]
    assert servers[1].weights == []
    assert len(servers[0].weights[1]) < len(everything)
    state.global_step = 3
    assert ahead.sample(requests) == results[0]
    assert servers[1].weights == [everything]
    output = capsys.readouterr().out
    assert "gets all weights with the next ones" in output
    assert "is back." in output
    ahead.close()
    assert not (tmp_path / "w").exists()


def test_after_a_failure_of_servers_that_sample_ahead_every_later_job_fails_too(servers, tmp_path):
    """All jobs after a failed one end with its error, also if the servers are back.

    A run that is ahead of the policy queues syncs and requests. The requests of a later job would
    be sampled by weights that never came.
    """
    state = TrainerState()
    ahead = sampler_ahead(servers, tmp_path / "w", state)
    requests = requests_of_groups(2)
    ahead.sync_weights()
    ahead.submit(requests).join()

    for server in servers:
        server.dead = True
    state.global_step = 1
    ahead.sync_weights()
    with pytest.raises(NoServerError, match="the last one: ConnectionError"):
        ahead.submit(requests).join()
    for server in servers:
        server.dead = False
    state.global_step = 2
    ahead.sync_weights()
    with pytest.raises(NoServerError, match="the last one: ConnectionError"):
        ahead.submit(requests).join()
    ahead.close()
    assert not (tmp_path / "w").exists()


def gather_three_tensors(gathered_names: list[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors a, b and c of 8 bytes, and note in `gathered_names` which were taken."""
    for name in ("a", "b", "c"):
        if gathered_names is not None:
            gathered_names.append(name)
        yield name, torch.zeros(2)


def test_a_sync_that_fails_on_the_disk_ends_in_one_line_with_all_ranks_in_step(tmp_path):
    """A sync into a folder that cannot be written ends in one line, after gathering all tensors.

    Other ranks take part in gathering each tensor, and would wait for a rank that stopped earlier.
    """
    (tmp_path / "file").write_text("")
    folder_below_file = tmp_path / "file" / "w"
    files = WeightFiles(folder_below_file, tmp_path)
    gathered_names: list[str] = []

    one_line = "adora_weight_transfer: .* cannot be written .*choose another"
    with (
        pytest.raises(UserError, match=one_line),
        files.write(gather_three_tensors(gathered_names)),
    ):
        raise AssertionError("nothing was written")
    assert gathered_names == ["a", "b", "c"], "other ranks gather every tensor"


def test_a_sync_deletes_the_weights_that_a_killed_run_has_left_and_nothing_else(
    tmp_path, monkeypatch
):
    """A sync deletes the folder of an earlier start of the same run, known by its name's start.

    Here the earlier start was killed, so no process holds the lock in its folder. A folder of
    another program stays.
    """
    monkeypatch.setattr("adora_vl.checkpoint.trl_state._MAX_FILE_BYTES", 8)  # a file each
    shared = tmp_path / "w"
    with WeightFiles(shared, tmp_path).write(gather_three_tensors()) as folder:
        assert len(list(folder.glob("*.safetensors"))) == 3
        assert [path.name for path in shared.iterdir()] == [folder.name]
    random_digits = 16  # at the end of the name
    folder_of_killed_run = shared / f"{folder.name[:-random_digits]}0123456789abcdef"
    folder_of_killed_run.mkdir(parents=True)
    (folder_of_killed_run / "lock").touch()
    folder_of_another_program = shared / "weights-000001"
    folder_of_another_program.mkdir()

    with WeightFiles(shared, tmp_path).write(gather_three_tensors()):
        pass

    assert list(shared.iterdir()) == [folder_of_another_program]


def test_a_folder_for_weights_that_was_there_stays_with_its_owners_rights(tmp_path):
    """A folder that was there before a sync stays, with its rights.

    The sync deletes only the folder that it has made inside it.
    """
    shared = tmp_path / "w"
    shared.mkdir()
    shared.chmod(0o700)
    with WeightFiles(shared, tmp_path).write(gather_three_tensors()):
        pass
    assert shared.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode_of_shared", "mode_of_folder", "mode_of_files"),
    [
        (None, 0o700, 0o600),
        (0o1777, 0o700, 0o600),  # as /dev/shm
        (0o755, 0o700, 0o600),
        (0o2750, 0o750, 0o640),  # set-group-id: what is made inside belongs to the group
    ],
)
def test_weights_are_read_by_their_user_and_by_a_group_that_was_let_in(
    tmp_path, mode_of_shared, mode_of_folder, mode_of_files
):
    """The group of a set-group-id folder may read the weights; else their user alone may.

    Weights lie in a folder of their own, inside a shared one. `mode_of_shared`: the rights of the
    shared folder if the user has made it; None: there is none.
    """
    shared = tmp_path / "w"
    if mode_of_shared is not None:
        shared.mkdir()
        shared.chmod(mode_of_shared)
    umask_before = os.umask(0o022)
    try:
        with WeightFiles(shared, tmp_path).write(iter([("w", torch.ones(2))])) as weight_folder:
            expected_mode = 0o700 if mode_of_shared is None else mode_of_shared
            assert shared.stat().st_mode & 0o7777 == expected_mode
            assert weight_folder.stat().st_mode & 0o777 == mode_of_folder
            modes = {path.stat().st_mode & 0o777 for path in weight_folder.iterdir()}
            assert modes == {mode_of_files}
    finally:
        os.umask(umask_before)


def test_two_runs_share_one_folder_of_weights(tmp_path):
    """Each run writes into a subfolder of its own, and the last one to end removes the folder."""
    shared = tmp_path / "w"
    with WeightFiles(shared, tmp_path / "one").write([("a", torch.zeros(2))]) as first:
        with WeightFiles(shared, tmp_path / "other").write([("b", torch.ones(2))]) as second:
            assert {path.name for path in shared.iterdir()} == {first.name, second.name}
            # A run in a container may have the host name and the output_dir of the first one.
            with WeightFiles(shared, tmp_path / "one").write([("a", torch.ones(2))]) as third:
                assert first.is_dir()
                assert load_file(first / "model-00001.safetensors")["a"].sum() == 0
                assert third != first
            assert second.is_dir()
            assert first.is_dir()
            assert not third.exists()
        assert shared.is_dir()
        assert not second.exists()
    assert not shared.exists()


def test_a_server_that_answers_nonsense_is_left_out_of_a_sync(servers, tmp_path, capsys):
    """A sync goes on without a server whose replies are nonsense, and the next one takes it back.

    Of two fake servers the second replies nonsense, first to GET requests and then to POST
    requests. `get_reply` makes a fake server's reply to a GET request, and `post_reply` to a POST.
    """
    engine = engine_with_servers(servers, tmp_path / "w", small_policy())
    reply_to_get = servers[1].get_reply
    reply_to_post = servers[1].post_reply
    nonsense: dict[str, Any] = {
        "get_reply": lambda path: [path],
        "post_reply": lambda path, body: None if body else [],
    }
    for method_name, nonsense_reply in nonsense.items():
        setattr(servers[1], method_name, nonsense_reply)
        engine.sync_weights()
        assert capsys.readouterr().out.count(" is left out (1 of 2") == 1, method_name
        servers[1].get_reply = reply_to_get
        servers[1].post_reply = reply_to_post
        engine.sync_weights()
        assert "is back" in capsys.readouterr().out


def test_a_server_that_takes_connections_and_says_nothing_is_left_out(
    servers, tmp_path, monkeypatch, capsys
):
    """A sync goes on without a server that accepts the connection and does not answer in time.

    Servers have 0.3 seconds to answer here, and the second one is silent for longer.
    """
    short_timeouts = Timeouts(connect_s=5.0, answer_s=0.3)
    monkeypatch.setattr("adora_vl.rollout.server_pool.SHORT_QUESTION_TIMEOUTS", short_timeouts)
    engine = engine_with_servers(servers, tmp_path / "w", small_policy())
    reply_to_get = servers[1].get_reply
    may_answer = Event()
    servers[1].get_reply = lambda path: reply_to_get(path) if may_answer.wait(20) else None
    engine.sync_weights()
    may_answer.set()
    assert [len(server.weights) for server in servers] == [1, 0]
    assert "is left out (1 of 2" in capsys.readouterr().out


def test_a_server_that_hangs_while_it_samples_is_left_out_at_the_deadline(
    servers, tmp_path, monkeypatch, capsys
):
    """The groups of a server that hangs are sampled by the other one, with the same results.

    A server gets one request at a time here, and has one second to answer.
    """
    monkeypatch.setattr("adora_vl.rollout.server_pool.MAX_REQUESTS_PER_SERVER", 1)
    requests = requests_of_groups(9)
    engine = engine_with_servers(servers, tmp_path / "w", answer_s=1.0)
    expected = sample_on_servers(engine, requests)
    may_answer = Event()
    paths_asked = []

    def hang(path: str, body: dict[str, Any]) -> None:
        paths_asked.append(path)
        may_answer.wait(60)

    servers[1].post_reply = hang
    assert sample_on_servers(engine, requests) == expected
    may_answer.set()
    assert len(paths_asked) <= 2, (
        "one for each thread: the deadline passes once, and a request that hangs is not repeated"
    )
    output = capsys.readouterr().out
    assert output.count(" is left out (1 of 2") == 1
    assert "it gave no answer in 1 s, half of ddp_timeout" in output


def test_a_run_that_ends_does_not_wait_for_its_servers():
    """A process whose requests hang ends all the same: they are in daemon threads.

    Python does not join these when the main thread ends. It would join the threads of an executor,
    so the process would not end in time.
    """
    script = """
from threading import Event, Thread
from adora_vl.utils.daemon_threads import run_on_daemon_threads
asked = Event()
def hang():
    asked.set()
    Event().wait()
arguments = ([hang] * 3, 2, "servers")
Thread(target=run_on_daemon_threads, args=arguments, daemon=True).start()
assert asked.wait(60)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0


def test_a_server_that_gives_other_log_probabilities_is_named_once_for_each_of_its_starts(
    servers, tmp_path, capsys
):
    """A server whose option `--logprobs-mode` is wrong is named in one line, again after a restart.

    Its log-probabilities are those after `top_p` and the like, not the policy's own. The line comes
    with the sync, since output while the model is loaded goes into a file.
    """
    servers[1].logprobs_mode = "processed_logprobs"
    engine = engine_with_servers(servers, tmp_path / "w", small_policy())
    assert capsys.readouterr().out == ""
    for is_restarted in (False, True):
        if is_restarted:
            servers[1].start_again()
        engine.sync_weights()
        engine.sync_weights()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"Server {servers[1].url} was started with --logprobs-mode proc")


def test_a_server_that_hangs_while_it_reads_weights_is_left_out_at_the_deadline(
    servers, tmp_path, capsys
):
    """A sync leaves out a server that has not read the weights after `answer_s` seconds.

    The first rank does so before the other ranks stop waiting for it.
    """
    engine = engine_with_servers(servers, tmp_path / "w", small_policy(), answer_s=1.0)
    reply_to_post = FakeVLLMServer.post_reply
    may_answer = Event()
    servers[1].post_reply = lambda path, body: (
        may_answer.wait(60) and reply_to_post(servers[1], path, body)
    )
    engine.sync_weights()
    servers[1].dead = True
    may_answer.set()
    assert len(servers[0].weights) == 1
    assert capsys.readouterr().out.count(" is left out (1 of 2") == 1


def test_servers_that_cannot_be_used_are_named_at_the_start(servers):
    """The start of a run names a server that refuses connections or allows no weight sync.

    vLLM allows the sync in its development mode alone.
    """
    with pytest.raises(
        EngineError, match=r"vllm_server_base_url: http://127.0.0.1:9 cannot be used"
    ):
        connect([servers[0].url, "http://127.0.0.1:9"], 0, 0.0)
    # A server without /server_info was not started in the mode that allows a weight sync.
    servers[0].get_reply = lambda path: None if path == "/server_info" else {"data": [{"id": "m"}]}
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        connect([servers[0].url], 0, 0.0)


def test_a_server_behind_a_login_is_used_and_the_password_is_said_nowhere(servers, monkeypatch):
    """User and password of a server's address are sent as its login, and no error has them.

    The server answers; is not there; or stands behind a proxy, which answers with errors alone.
    """
    address = servers[0].url.replace("//", "//me:pass%40word@")
    (server,) = connect([address], 0, 0.0)
    basic = f"Basic {b64encode(b'me:pass@word').decode()}"

    assert server.base_url == servers[0].url
    assert servers[0].logins == {basic}
    config = SimpleNamespace(vllm_server_base_url=address)
    assert server_context_length(config) == 4096  # the default of the fake server
    assert servers[0].logins == {basic}
    # The second fake server plays a proxy.
    monkeypatch.setenv("http_proxy", servers[1].url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    connect([address], 0, 0.0)
    assert servers[1].logins == set(), "a proxy gets nothing that is for this machine"
    servers[1].get_reply = servers[0].get_reply = lambda path: None
    for wrong in (
        address,
        "http://me:pass%40word@127.0.0.1:9",
        "http://me:pass%40word@far.invalid:8000",
    ):
        with pytest.raises(
            EngineError, match="vllm_server_base_url: http://[^@]* cannot be used"
        ) as error:
            connect([wrong], 0, 0.1)
        assert "pass" not in f"{error.value}{error.value.__cause__}"
    assert servers[1].logins == {basic}, "for the address that is not on this machine"


def test_what_every_server_would_refuse_is_not_asked_of_all(servers, tmp_path):
    """A server that refuses a request has no fault of its own, so none is left out."""
    engine = engine_with_servers(servers, tmp_path / "w")
    servers[0].post_reply = lambda path, body: None  # the fake server then replies with error 404
    with pytest.raises(RolloutError, match="refuses what it is asked: Request failed: 404"):
        sample_on_servers(engine, requests_of_groups(1))
    assert len(engine.server_group.pool.servers_in_use) == 2
