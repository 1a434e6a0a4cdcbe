"""One machine and several: what is found on it, what is refused before a start, and what the ranks
compare.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_simple_launcher_cmd_env

from adora_vl.builtin import builtin_data
from adora_vl.builtin.tiny_text import TextStart
from adora_vl.checkpoint import fingerprint as ranks
from adora_vl.checkpoint import store
from adora_vl.checkpoint.fingerprint import (
    RankView,
    check_ranks,
    create_token_file,
    describe_rank_mismatch,
)
from adora_vl.checkpoint.store import publish_checkpoint, read_checkpoint_manifest
from adora_vl.checkpoint.writer import CheckpointWriter
from adora_vl.config.dry_run_options import DryRunOptions
from adora_vl.config.run_context import RunContext
from adora_vl.config.schema import parse
from adora_vl.config.sharding import Sharding, sharding_from_environment, sharding_from_file
from adora_vl.preflight.check_machine import check_several_machines
from adora_vl.train import main
from adora_vl.training.guards import errors_with_step
from adora_vl.utils.errors import RunError, UserError, lost_contact_message
from adora_vl.utils.files import replacing_file
from adora_vl.utils.launch import fewer_than_asked, free_port, put_own_programs_on_path, use_one_gpu

REPOSITORY = Path(__file__).parents[3]
CONFIGS = REPOSITORY / "configs"
TWO_MACHINES_CONFIG = CONFIGS / "accelerate" / "zero3_nodes.yaml"


# ---------------------------------------------------------------------------- the accelerate config


def test_a_run_says_that_accelerate_has_started_one_process_in_place_of_two():
    """A process can tell it by the environment variables that accelerate sets."""

    def note_after_launch(*words: str) -> str:
        launch = ["--config_file", str(CONFIGS / "accelerate" / "cpu.yaml"), *words, "train.py"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(launch))
        _, environment = prepare_simple_launcher_cmd_env(args)
        return fewer_than_asked(environment)

    with mock.patch.dict(os.environ):
        for name in [
            variable
            for variable in os.environ
            if variable == "MASTER_ADDR" or variable.endswith(("WORLD_SIZE", "RANK"))
        ]:
            del os.environ[name]  # what a trainer of another test has left
        assert (
            note_after_launch()
            == ""
            == fewer_than_asked({})
            == fewer_than_asked({"MASTER_ADDR": "127.0.0.1"})
        )
        assert note_after_launch("--num_processes", "2").startswith(
            "accelerate was asked for several processes and has started one"
        )


def test_each_machine_has_as_many_processes_as_in_the_file(subtests):
    cases = [
        ({}, Sharding(processes=16, stage=3, machines=2)),
        ({"machines": 4}, Sharding(processes=32, stage=3, machines=4)),
        ({"machines": 1}, Sharding(processes=8, stage=3)),
        ({"machines": 4, "processes": 8}, Sharding(processes=8, stage=3, machines=4)),
    ]
    for options, expected in cases:
        with subtests.test(f"{options!r:.80}"):
            assert sharding_from_file(TWO_MACHINES_CONFIG, **options) == expected


def test_what_several_machines_could_not_start_from_is_refused(case_folder):
    cases = [
        (
            "main_process_port: 29500",
            "main_process_port: 0",
            "main_process_port: 0, which becomes another port on",
        ),
        (
            "deepspeed_multinode_launcher: standard",
            "deepspeed_multinode_launcher: pdsh",
            "needs pdsh and a hostfile",
        ),
        (
            "distributed_type: DEEPSPEED",
            "distributed_type: FSDP",
            "asks for FSDP, which is not supported",
        ),
    ]
    for before, after, message in cases:
        with case_folder(before) as folder:
            content = TWO_MACHINES_CONFIG.read_text()
            assert before in content
            (folder / "a.yaml").write_text(content.replace(before, after))
            with pytest.raises(UserError, match=message):
                sharding_from_file(folder / "a.yaml")
    with pytest.raises(UserError, match="16 processes cannot be spread evenly over 3 machines"):
        sharding_from_file(TWO_MACHINES_CONFIG, processes=16, machines=3)


def test_machines_are_known_from_what_the_launcher_tells(monkeypatch):
    environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4", "ACCELERATE_USE_DEEPSPEED": "true"}
    assert sharding_from_environment(environment) == Sharding(processes=16, stage=2, machines=4)


def test_fsdp_is_refused_in_a_run_and_in_a_dry_run(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for context in (
        lambda: RunContext.of_launch("ignore"),
        lambda: RunContext.of_dry_run(DryRunOptions(), on_this_machine=True),
    ):
        with pytest.raises(UserError, match="its config asks for FSDP, which is not supported"):
            context()


OPTIONS_FOR_TWO_MACHINES = [
    "--num_machines",
    "2",
    "--num_processes",
    "16",
    "--main_process_port",
    "29500",
]
OPTIONS_FOR_TWO_MACHINES += ["--deepspeed_multinode_launcher", "standard"]


def test_accelerate_itself_reads_the_config_as_it_is_meant(subtests):
    """One launcher a machine through torch, with a fixed meeting point: no pdsh, no hostfile.

    With the options of the scripts in `setup/`, a config of one machine serves as well.
    """
    for file, options in (("zero3_nodes", []), ("zero3_offload", OPTIONS_FOR_TWO_MACHINES)):
        with subtests.test(file):
            words = [
                "--config_file",
                str(CONFIGS / "accelerate" / f"{file}.yaml"),
                *options,
                "--machine_rank",
                "1",
            ]
            words += ["--main_process_ip", "10.0.0.1", "-m", "adora_vl.train"]
            args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            command, _ = prepare_deepspeed_cmd_env(args)
            assert command is None, "a command would be DeepSpeed's launcher"
            assert args.nnodes == "2"
            assert args.nproc_per_node == "8"
            assert args.node_rank == 1
            meets_at = (
                (args.master_addr, args.master_port)
                if args.same_network
                else args.rdzv_endpoint.split(":")
            )
            assert (*meets_at, args.rdzv_backend) == ("10.0.0.1", "29500", "static")
            assert args.shutdown_timeout == 3600


# -------------------------------------------------------------------------------------- the dry run


def test_a_dry_run_for_four_machines(capsys):
    words = [
        "--config",
        str(CONFIGS / "train" / "adora_7b_geo3k.yaml"),
        "--dry-run",
        "--card-gib",
        "80",
    ]
    offload = CONFIGS / "accelerate" / "zero3_offload.yaml"
    assert main([*words, "--accelerate-config", str(offload), "--machines", "4"]) == 0
    output = capsys.readouterr().out
    assert "4 machines with 8 processes each, started by setup/slurm/train.sbatch" in output
    assert "32 processes on 4 machines, DeepSpeed ZeRO-3, optimizer in host memory" in output
    assert "GiB for the optimizer of the processes of one machine" in output
    assert "output_dir must be on a disk that all of them share" in output


def parse_config(*words):
    return parse(["--use_cpu", "true", "--bf16", "false", *words])[1]


def test_an_engine_lies_on_one_machine_and_one_machine_saves():
    config = parse_config(
        "--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_tensor_parallel_size", "4"
    )
    check_several_machines(config, processes=16, machines=4)
    with pytest.raises(
        UserError,
        match="vllm_tensor_parallel_size: 4 does not divide the 2 processes of one machine",
    ):
        check_several_machines(config, processes=8, machines=4)
    config = parse_config("--save_on_each_node", "true")
    check_several_machines(config, processes=2, machines=1)
    with pytest.raises(UserError, match="save_on_each_node: true is not supported"):
        check_several_machines(config, processes=2, machines=2)


# --------------------------------------------------------------------------- what the ranks compare


@pytest.fixture
def single_rank(monkeypatch):
    """The only rank: what is gathered from all ranks is what this one has."""
    monkeypatch.setattr(ranks, "gather_object", lambda mine: mine)


def test_ranks_that_share_the_folder_go_on_and_leave_nothing_in_it(tmp_path, single_rank):
    (tmp_path / f"{ranks._SHARED_FILE_PREFIX}of-a-start-that-was-killed").touch()
    token = create_token_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [token]
    check_ranks(
        tmp_path,
        token,
        rank0_fingerprint={"seed": "1"},
        rank_fingerprint={"seed": "1"},
        patience_s=0,
    )
    assert not list(tmp_path.iterdir())


def test_a_rank_with_another_disk_is_refused(tmp_path, single_rank):
    """It is refused even if its disk has such a file too, from a start of its own."""
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    token = create_token_file(ours)
    create_token_file(theirs)
    with pytest.raises(
        UserError, match="is not the folder that rank 0 has on .*a disk that they share"
    ):
        check_ranks(theirs, token, rank0_fingerprint={}, rank_fingerprint={}, patience_s=0)


def test_a_disk_that_shows_new_files_late_is_waited_for(tmp_path, single_rank):
    token = create_token_file(tmp_path)
    (tmp_path / token).unlink()
    late = threading.Timer(0.3, (tmp_path / token).touch)
    late.start()
    check_ranks(tmp_path, token, rank0_fingerprint={}, rank_fingerprint={}, patience_s=30)
    late.join()


def test_a_machine_that_was_started_with_other_arguments_is_named(tmp_path, single_rank):
    token = create_token_file(tmp_path)
    named = rf"on {socket.gethostname()} \(rank 0\) the run .* beta: 0 -> 1 \(and 1 more\)"
    with pytest.raises(UserError, match=named):
        check_ranks(
            tmp_path,
            token,
            rank0_fingerprint={"seed": "1", "beta": "0"},
            rank_fingerprint={"seed": "2", "beta": "1"},
            patience_s=0,
        )


def test_the_first_rank_that_differs_is_named():
    fine = RankView(machine="one", shares_folder=True, differences=[])
    different = RankView(machine="two", shares_folder=True, differences=["dataset: a -> b"])
    assert describe_rank_mismatch([fine, fine], Path("out")) is None
    problem = describe_rank_mismatch([fine, different], Path("out"))
    assert "on two (rank 1) the run is not the one of rank 0: dataset: a -> b;" in problem
    problem = describe_rank_mismatch(
        [fine, fine, RankView(machine="two", shares_folder=False, differences=[])], Path("out")
    )
    assert problem.startswith(
        "output_dir: 'out' on two (rank 2) is not the folder that rank 0 has on one;"
    )


# ------------------------------------------------------------------------------------ a shared disk


def test_machines_that_share_the_cache_build_a_model_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    built = []
    meet = threading.Barrier(2)
    inside = threading.Barrier(2)
    plan = asdict(TextStart())

    def build(folder: Path, *_: Any) -> None:
        built.append(folder)
        with contextlib.suppress(threading.BrokenBarrierError):
            inside.wait(0.5)  # for the other one, who must not come
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").touch()
        (folder / "build.json").write_text(json.dumps({"plan": plan}))

    def ask() -> None:
        meet.wait()
        builtin_data.resolve_model("tiny_text")

    monkeypatch.setattr(builtin_data, "build_start", build)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [tmp_path / "home" / "tiny_text"]


def test_a_small_model_of_an_older_plan_is_built_again(tmp_path, monkeypatch, subtests):
    plan = asdict(TextStart())
    cases: list[Any] = [{"plan": {"steps": 250, "slips": 0.5}}, {"parameters": 1}, ["plan"], None]
    for number, facts in enumerate(cases):
        with subtests.test(f"{facts!r:.80}"):
            monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / str(number)))
            folder = tmp_path / str(number) / "tiny_text"
            built: list[Path] = []
            folder.mkdir(parents=True)
            (folder / "model.safetensors").touch()
            if facts is not None:
                (folder / "build.json").write_text(json.dumps(facts))

            def build(folder: Path, *_: Any, built: list[Path] = built) -> None:
                built.append(folder)
                (folder / "build.json").write_text(json.dumps({"plan": plan}))

            monkeypatch.setattr(builtin_data, "build_start", build)
            for _ in range(2):
                assert builtin_data.resolve_model("tiny_text") == str(folder)
            assert built == [folder], "once, and not again"


def test_processes_of_equal_number_do_not_write_into_each_others_file(tmp_path, monkeypatch):
    """Two machines, or two containers, count their processes from 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with replacing_file(tmp_path / "a.png") as first, replacing_file(tmp_path / "a.png") as second:
        first.write(b"whole")
        second.write(b"whole")
    assert (tmp_path / "a.png").read_bytes() == b"whole"
    assert len(list(tmp_path.iterdir())) == 1


def stage_checkpoint(folder: Path) -> Path:
    """Write a checkpoint that is not published yet, with the file `mine` of this machine."""
    checkpoint = folder / ".saving" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "mine").write_text("1")
    return checkpoint


def test_a_file_of_another_machine_that_shows_late_is_sealed_too(tmp_path, monkeypatch):
    """Also where the list of the folder's files stays what it was, as a client of NFS may have it."""
    checkpoint = stage_checkpoint(tmp_path)
    monkeypatch.setattr(store, "file_names_below", lambda folder: ["mine"])
    late = threading.Timer(0.3, (checkpoint / "theirs").write_text, ["2"])
    late.start()
    publish_checkpoint(
        checkpoint,
        final=tmp_path / "checkpoint-3",
        metadata={"step": 3},
        written_files={"mine", "theirs"},
    )
    late.join()
    assert read_checkpoint_manifest(tmp_path / "checkpoint-3")["files"].keys() == {"mine", "theirs"}


def test_a_checkpoint_without_the_part_of_a_machine_never_gets_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "appears_in_time", lambda path: path.exists())
    with pytest.raises(FileNotFoundError, match="a file of another machine does not appear here"):
        publish_checkpoint(
            stage_checkpoint(tmp_path),
            final=tmp_path / "checkpoint-3",
            metadata={"step": 3},
            written_files={"mine", "theirs"},
        )
    assert not (tmp_path / "checkpoint-3").exists()


# --------------------------------------------------------------------------- a machine that is lost

GLOO_CLOSED = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.77.0.2]:39113"
GLOO_RESET = (
    "[/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:62169: Connection reset by peer. "
    "This is typically"
)
NCCL_EXITED = (
    "NCCL error in: ProcessGroupNCCL.cpp:77: remote process exited or there was a network error, "
    "NCCL version 2"
)


def test_the_loss_of_a_machine_is_said_in_one_line(monkeypatch, capsys, tmp_path, subtests):
    for number, words in enumerate((GLOO_CLOSED, GLOO_RESET, NCCL_EXITED)):
        with subtests.test(words):

            def lose(*_: object, words: str = words) -> Any:
                raise RuntimeError(f"{words}\nframe #0: c10d::ProcessGroup")

            lost = pytest.raises(
                RunError,
                match="step 4: another process has ended, or its machine cannot be reached",
            )
            with (
                lost,
                errors_with_step(lambda: 3, lambda: "the same command goes on from checkpoint-3"),
            ):
                lose()
            writer = CheckpointWriter(
                tmp_path / str(number), keep=None, accelerator=Accelerator(cpu=True)
            )
            with pytest.raises(
                RunError, match="checkpoint-3 could not be written .*cannot be reached"
            ) as caught:
                writer.write(3, lose)
            assert len(str(caught.value).splitlines()) == 1
            monkeypatch.setattr("adora_vl.train.train", lose)
            assert main(["--config", "configs/train/smoke_cpu.yaml"]) == 1
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith("error: outside the training: another process has ended")
            assert words in last
    assert not lost_contact_message(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_contact_message(ValueError("Connection closed by peer"))


# -------------------------------------------------------------------------------------- the scripts


def write_program(folder: Path, name: str, text: str) -> None:
    """Write a shell script that the scripts in `setup/` find instead of a program of this name."""
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def run_script(
    name: str, *words: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of `setup/` in a folder whose programs are found first."""
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(REPOSITORY / "setup" / name), *words],
        cwd=folder,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def launch_words(host: str, port: int) -> str:
    """Return the words that the first of two machines starts its launcher with, joined by `|`."""
    return (
        "launch|--config_file|configs/accelerate/zero3_nodes.yaml|--deepspeed_multinode_launcher|standard|"
        f"--num_machines|2|--num_processes|16|--main_process_ip|{host}|--main_process_port|{port}|--machine_rank|0|"
        "-m|adora_vl.train|--config|a b.yaml|--output_dir|out|"
    )


SLURM_VARIABLES = {
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_ID": "12345",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.fixture
def run_slurm(tmp_path):
    """Write stand-ins for Slurm's commands into a folder, and return the folder.

    `srun` starts one task for each of two nodes, one after the other. `scontrol requeue` writes the
    job's number into a file.
    """
    write_program(
        tmp_path,
        "scontrol",
        'case $1 in show) echo n1; echo n2 ;; requeue) echo "$2" >requeued ;; esac',
    )
    on_each_node = 'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || code=$?; done'
    write_program(tmp_path, "srun", f"shift 2; {on_each_node}; exit ${{code:-0}}")
    return tmp_path


def test_a_slurm_job_starts_each_node_and_queues_itself_again_when_it_was_stopped(run_slurm):
    write_program(
        run_slurm,
        "launch",
        'printf "%s|" "$@"; echo; mkdir -p out; echo {} >out/stopped.json; exit 1',
    )
    words = ["--config", "a b.yaml", "--output_dir", "out"]
    process = run_script(
        "slurm/train.sbatch",
        *words,
        folder=run_slurm,
        SLURM_SUBMIT_DIR=str(run_slurm),
        LAUNCH="./launch",
        **SLURM_VARIABLES,
    )
    first, second, *_ = process.stdout.splitlines()
    assert first == launch_words("n1", 22345)
    assert second == first.replace("--machine_rank|0", "--machine_rank|1")
    assert process.returncode == 75
    assert (run_slurm / "requeued").read_text() == "12345\n"


def test_both_scripts_divide_the_cores_among_the_processes_of_a_machine(run_slurm):
    """An optimizer in host memory would work on the one thread that accelerate gives."""
    write_program(run_slurm, "launch", "echo threads $OMP_NUM_THREADS")
    omp = "OMP_NUM_THREADS"
    variables = {"SLURM_SUBMIT_DIR": str(run_slurm), "LAUNCH": "./launch", **SLURM_VARIABLES}
    for name, cores, threads in (
        ("SLURM_CPUS_ON_NODE", "96", 12),
        ("SLURM_CPUS_ON_NODE", "4", 1),
        (omp, "5", 5),
    ):
        process = run_script(
            "slurm/train.sbatch",
            "--output_dir",
            "out",
            folder=run_slurm,
            **variables,
            **{name: cores},
        )
        assert process.stdout.split() == ["threads", str(threads)] * 2, process.stderr
    write_program(run_slurm, "ssh", 'shift 3; eval "$*"')
    write_program(run_slurm, "nproc", "echo 64")
    for changed, threads in (
        ({}, 16),
        ({"ENVIRONMENT": "OMP_NUM_THREADS=3"}, 3),
    ):
        environment = {"HOSTS": "one", "LAUNCH": "./launch", "PROCESSES_PER_NODE": "4", **changed}
        process = run_script(
            "ssh/train.sh",
            "--output_dir",
            "out",
            folder=run_slurm,
            **environment,
        )
        assert process.stdout.split() == ["one:", "threads", str(threads)], process.stderr


def test_a_slurm_job_that_fails_is_not_queued_again(run_slurm):
    """A note that an earlier stop has left does not count: the job would be queued for ever."""
    (run_slurm / "out").mkdir()
    (run_slurm / "out" / "stopped.json").touch()
    write_program(run_slurm, "launch", "exit 1")
    environment = {**SLURM_VARIABLES, "SLURM_SUBMIT_DIR": str(run_slurm), "LAUNCH": "./launch"}
    process = run_script("slurm/train.sbatch", "--output_dir=out", folder=run_slurm, **environment)
    assert process.returncode == 1
    assert not (run_slurm / "requeued").exists()
    process = run_script(
        "slurm/train.sbatch",
        "--config",
        "a.yaml",
        folder=run_slurm,
        **environment,
    )
    assert process.returncode == 2
    assert "--output_dir: not among the arguments" in process.stderr


def test_port_0_is_refused_for_machines_that_meet_over_ssh(tmp_path):
    process = run_script(
        "ssh/train.sh",
        "--output_dir",
        "out",
        folder=tmp_path,
        HOSTS="one two",
        PORT="0",
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error: PORT: 0 is no port for several machines")


@pytest.fixture
def run_ssh(tmp_path):
    """A folder with a program `ssh` that runs the command for each host on this machine."""
    write_program(tmp_path, "ssh", 'shift 2; export HOST="$1"; exec bash -c "$2"')
    return tmp_path


def test_over_ssh_each_machine_gets_its_rank_and_what_the_processes_need(run_ssh):
    write_program(run_ssh, "launch", 'printf "%s|" "$HOST" "$NCCL_SOCKET_IFNAME" "$@"; echo')
    environment = {
        "HOSTS": "one two",
        "LAUNCH": "./launch",
        "ENVIRONMENT": "NCCL_SOCKET_IFNAME=eth1",
    }
    process = run_script(
        "ssh/train.sh", "--config", "a b.yaml", "--output_dir", "out", folder=run_ssh, **environment
    )
    first, second = sorted(process.stdout.splitlines())
    assert process.returncode == 0, process.stderr
    assert first == "one: one|eth1|" + launch_words("one", 29500)
    assert second == first.replace("one: one", "two: two").replace(
        "--machine_rank|0", "--machine_rank|1"
    )


def test_over_ssh_a_machine_that_fails_ends_the_others(run_ssh):
    """The others would wait for its processes; they are given GRACE seconds, and then killed."""
    write_program(run_ssh, "launch", 'if [ "$HOST" = two ]; then exit 3; fi; sleep 55 & wait')
    environment = {"HOSTS": "one two", "LAUNCH": "./launch", "GRACE": "0"}
    process = run_script(
        "ssh/train.sh",
        "--output_dir",
        "out",
        folder=run_ssh,
        **environment,
    )
    assert process.returncode == 3
    assert "two ended with 3; the others have 0 seconds to end" in process.stderr


def test_over_ssh_a_stopped_run_ends_with_75(run_ssh):
    write_program(run_ssh, "launch", "mkdir -p out; touch out/stopped.json; exit 1")
    process = run_script(
        "ssh/train.sh", "--output_dir", "out", folder=run_ssh, HOSTS="one two", LAUNCH="./launch"
    )
    assert process.returncode == 75


def test_over_ssh_a_stop_in_the_first_moment_is_not_lost(run_ssh):
    """The launcher has not left its number yet when the script is told to stop."""
    write_program(run_ssh, "launch", "exec sleep 300")
    write_program(
        run_ssh,
        "ssh",
        'shift 2; case "$2" in *launch*) touch starting; sleep 1 ;; esac; exec bash -c "$2"',
    )
    script = subprocess.Popen(
        ["bash", str(REPOSITORY / "setup" / "ssh" / "train.sh"), "--output_dir", "out"],
        cwd=run_ssh,
        env={"PATH": f"{run_ssh}:{os.environ['PATH']}", "HOSTS": "one", "LAUNCH": "./launch"},
    )
    while not (run_ssh / "starting").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.terminate()
    assert script.wait(100) == 128 + signal.SIGTERM


# --------------------------------------------------------------------------- one machine's programs


def test_programs_of_an_environment_that_was_not_activated_are_found(
    monkeypatch, tmp_path, subtests
):
    """DeepSpeed asks for `ninja` by name, as this child process does for a program beside the
    interpreter.
    """
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin", "ninja", "echo own ninja")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for path in ("/usr/bin:/bin", "", None):
        with subtests.test(f"{path}"):
            monkeypatch.delenv("PATH") if path is None else monkeypatch.setenv("PATH", path)
            for _ in range(2):  # the engine's environment may be prepared more than once
                put_own_programs_on_path()
            assert (
                subprocess.run(["ninja"], capture_output=True, text=True, check=True).stdout
                == "own ninja\n"
            )
            assert os.environ["PATH"].split(os.pathsep).count(str(tmp_path / "bin")) == 1


def test_a_single_process_takes_the_first_gpu_that_the_user_shows_it(monkeypatch, subtests):
    cases = [
        (None, "1", "0"),
        ("3", "1", "3"),
        ("2,3", "1", "2"),
        ("", "1", ""),
        ("2,3", "2", "2,3"),
        (None, "4", None),
    ]
    for visible, processes, device in cases:
        with subtests.test(f"{visible} {processes}"):
            monkeypatch.setenv("WORLD_SIZE", processes)
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            if visible is not None:
                monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            use_one_gpu()
            assert os.environ.get("CUDA_VISIBLE_DEVICES") == device


def test_no_accelerate_config_overrides_the_users_choice_of_a_gpu():
    for file in (CONFIGS / "accelerate").glob("*.yaml"):
        assert "gpu_ids" not in yaml.safe_load(file.read_text()), file.name


def test_a_port_is_free_and_no_connection_will_be_given_it(monkeypatch):
    """Ports of the system's range are for connections, and could be taken before they are used."""
    ports = {free_port() for _ in range(20)}
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_of_range = int(range_file.read_text().split()[0]) if range_file.exists() else 32_768
    assert len(ports) > 10
    assert max(ports) < first_of_range
    with socket.socket() as listener, socket.socket() as closed:
        listener.bind(("127.0.0.1", 0))
        closed.bind(("127.0.0.1", 0))
        used_port = listener.getsockname()[1]
        unused_port = closed.getsockname()[1]
        closed.close()
        candidates = [used_port, unused_port]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: candidates)
        assert free_port() == unused_port
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [used_port])
        with pytest.raises(RunError, match="set MASTER_PORT to one that is"):
            free_port()
