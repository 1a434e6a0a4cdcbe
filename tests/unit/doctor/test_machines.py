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
from adora_vl.checkpoint import fingerprint as fingerprint_module
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
from adora_vl.config.sharding import Sharding, sharding_from_environment, sharding_from_file
from adora_vl.preflight.check_machine import check_machine, check_several_machines
from adora_vl.train import main
from adora_vl.training.guards import errors_with_step
from adora_vl.utils.errors import RunError, UserError, lost_contact_message
from adora_vl.utils.files import replacing_file
from adora_vl.utils.launch import (
    free_port,
    put_environment_first_on_path,
    single_process_note,
    use_one_gpu,
)
from tests.support.commands import parse
from tests.support.stand_ins import checked_config, training_config

REPOSITORY = Path(__file__).parents[3]
CONFIGS = REPOSITORY / "configs"
TWO_MACHINES_CONFIG = CONFIGS / "accelerate" / "zero3_nodes.yaml"


# ---------------------------------------------------------------------------- the accelerate config


def test_a_run_says_that_accelerate_has_started_one_process_in_place_of_two():
    """A run warns if accelerate was asked for two processes and has started one.

    A process can tell it by the environment variables that accelerate sets.
    """

    def warning_after_launch(*arguments: str) -> str:
        """Return what `single_process_note` says of a start with these options of accelerate."""
        # as `accelerate launch` itself does it, up to the start of the process
        launch = ["--config_file", str(CONFIGS / "accelerate" / "cpu.yaml"), *arguments, "train.py"]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(launch))
        _, environment = prepare_simple_launcher_cmd_env(args)
        with mock.patch.dict(os.environ, environment, clear=True):
            return single_process_note()

    with mock.patch.dict(os.environ):
        for name in [
            variable
            for variable in os.environ
            if variable == "MASTER_ADDR" or variable.endswith(("WORLD_SIZE", "RANK"))
        ]:
            del os.environ[name]  # what a trainer of another test has left
        assert warning_after_launch() == "" == single_process_note()
        assert warning_after_launch("--num_processes", "2").startswith(
            "accelerate was asked for several processes and has started one"
        )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        assert single_process_note() == ""


def test_each_machine_has_as_many_processes_as_in_the_file(subtests):
    """Another number of machines keeps 8 processes on each, as the file for two machines has."""
    cases: list[Any] = [  # machines and processes of the command, expected sharding
        (None, None, Sharding(processes=16, zero_stage=3, machines=2)),
        (4, None, Sharding(processes=32, zero_stage=3, machines=4)),
        (1, None, Sharding(processes=8, zero_stage=3)),
        (4, 8, Sharding(processes=8, zero_stage=3, machines=4)),
    ]
    for machines, processes, expected in cases:
        with subtests.test(f"{machines} {processes}"):
            sharding = sharding_from_file(
                TWO_MACHINES_CONFIG, processes=processes, machines=machines
            )
            assert sharding == expected


def test_what_several_machines_could_not_start_from_is_refused(case_folder):
    """A config with which several machines could not start is refused with the key to change.

    Each case replaces one line of the config of two machines. Processes that are not a multiple of
    the machines are refused too.
    """
    cases = [  # line of the config, what replaces it, words of the error
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
    for line, replacement, message in cases:
        with case_folder(line) as folder:
            content = TWO_MACHINES_CONFIG.read_text()
            assert line in content
            (folder / "a.yaml").write_text(content.replace(line, replacement))
            with pytest.raises(UserError, match=message):
                sharding_from_file(folder / "a.yaml", processes=None, machines=None)
    with pytest.raises(UserError, match="16 processes cannot be spread evenly over 3 machines"):
        sharding_from_file(TWO_MACHINES_CONFIG, processes=16, machines=3)


def test_machines_are_known_from_what_the_launcher_tells():
    """16 processes, 4 on each machine, are 4 machines."""
    environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}
    assert sharding_from_environment(environment) == Sharding(processes=16, machines=4)


def test_fsdp_is_refused_in_a_run_and_in_a_dry_run(monkeypatch):
    """The variable that accelerate sets for FSDP is enough to refuse the run."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for context in (
        lambda: RunContext.of_launch(training_config(), output_dir_mode="ignore"),
        lambda: RunContext.of_dry_run(training_config(), DryRunOptions(), on_this_machine=True),
    ):
        with pytest.raises(UserError, match="its config asks for FSDP, which is not supported"):
            context()


def test_deepspeed_is_refused_where_the_launch_sets_it_up_too(monkeypatch, tmp_path):
    """A run knows the launch by its variable, and a dry run by the accelerate config."""
    file = tmp_path / "zero2.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    with_key = training_config(deepspeed=str(file))
    zero3 = DryRunOptions(accelerate_config=Path("configs/accelerate/cpu_zero3.yaml"))
    with pytest.raises(UserError, match="^deepspeed: the accelerate config sets a ZeRO stage"):
        RunContext.of_dry_run(with_key, zero3, on_this_machine=True)
    RunContext.of_dry_run(with_key, DryRunOptions(), on_this_machine=True)
    RunContext.of_dry_run(training_config(), zero3, on_this_machine=True)

    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(UserError, match="^deepspeed: the accelerate config sets a ZeRO stage"):
        checked_config(deepspeed=str(file))


def test_deepspeed_is_refused_where_accelerate_would_not_start_it(monkeypatch):
    """The key `deepspeed` is refused where accelerate was launched with `use_cpu: true`.

    Such a launch, as by cpu.yaml, sets `ACCELERATE_USE_CPU` and starts no DeepSpeed. That of
    cpu_zero3.yaml does not set it.
    """
    zero2 = {"zero_optimization": {"stage": 2}}
    config = training_config(deepspeed=zero2)
    context = RunContext(on_this_machine=True, sharding=Sharding(), output_dir_mode="ignore")
    check_machine(config, context)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    check_machine(training_config(), context)
    with pytest.raises(UserError, match="^deepspeed: accelerate was launched with use_cpu: true"):
        check_machine(config, context)


# what the scripts in `setup/` add for two machines with 8 processes each
OPTIONS_FOR_TWO_MACHINES = [
    *("--num_machines", "2"),
    *("--num_processes", "16"),
    *("--main_process_port", "29500"),
    *("--deepspeed_multinode_launcher", "standard"),
]


def test_accelerate_itself_reads_the_config_as_it_is_meant(subtests):
    """accelerate starts torch's launcher on each machine, which all meet at a fixed address.

    DeepSpeed's own launcher would need pdsh and a hostfile. With the options of the scripts in
    `setup/`, a config of one machine serves as well.
    """
    for file, options in (("zero3_nodes", []), ("zero3_offload", OPTIONS_FOR_TWO_MACHINES)):
        with subtests.test(file):
            arguments = [
                *("--config_file", str(CONFIGS / "accelerate" / f"{file}.yaml")),
                *options,
                *("--machine_rank", "1"),
                *("--main_process_ip", "10.0.0.1"),
                *("-m", "adora_vl.train"),
            ]
            args, defaults, _ = _validate_launch_command(
                launch_command_parser().parse_args(arguments)
            )
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            command, _ = prepare_deepspeed_cmd_env(args)
            assert command is None, "a command would be DeepSpeed's launcher"
            assert args.nnodes == "2"
            assert args.nproc_per_node == "8"
            assert args.node_rank == 1
            meeting_point = (
                (args.master_addr, args.master_port)
                if args.same_network
                else args.rdzv_endpoint.split(":")
            )
            assert (*meeting_point, args.rdzv_backend) == ("10.0.0.1", "29500", "static")
            assert args.shutdown_timeout == 3600, "seconds, as in the config's file"


# -------------------------------------------------------------------------------------- the dry run


def test_a_dry_run_for_four_machines(capsys):
    """The plan counts 4 × 8 processes and says what several machines share."""
    arguments = [
        "--config",
        str(CONFIGS / "train" / "adora_7b_geo3k.yaml"),
        "--dry-run",
        "--card-gib",
        "80",
    ]
    offload = CONFIGS / "accelerate" / "zero3_offload.yaml"
    assert main([*arguments, "--accelerate-config", str(offload), "--machines", "4"]) == 0
    output = capsys.readouterr().out
    assert "4 machines with 8 processes each, started by setup/slurm/train.sbatch" in output
    assert "32 processes on 4 machines, DeepSpeed ZeRO-3, optimizer in host memory" in output
    assert "GiB for the optimizer of the processes of one machine" in output
    assert "output_dir must be on a disk that all of them share" in output


def parse_config(*arguments):
    """Return the config of a run on the CPU with these arguments added."""
    return parse(["--use_cpu", "true", "--bf16", "false", *arguments])[1]


def test_an_engine_lies_on_one_machine_and_one_machine_saves():
    """The tensor parallel size has to divide the processes of a machine, and only one may save."""
    config = parse_config(
        "--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_tensor_parallel_size", "4"
    )
    check_several_machines(config, processes=16, machines=4)  # 4 processes a machine
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
    monkeypatch.setattr(fingerprint_module, "gather_object", lambda mine: mine)


@pytest.fixture
def without_patience(monkeypatch):
    """A file that is not there yet is not waited for."""
    monkeypatch.setattr(fingerprint_module, "wait_until_visible", Path.exists)


def test_ranks_that_share_the_folder_go_on_and_leave_nothing_in_it(tmp_path, single_rank):
    """Ranks that see rank 0's file in the output folder go on, and the file is removed.

    The file of an earlier start that was killed is removed when rank 0 writes its own.
    """
    (tmp_path / f"{fingerprint_module._SHARED_FILE_PREFIX}of-a-start-that-was-killed").touch()
    token = create_token_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [token]
    check_ranks(
        tmp_path,
        token,
        rank0_fingerprint={"seed": "1"},
        rank_fingerprint={"seed": "1"},
    )
    assert not list(tmp_path.iterdir())


def test_a_rank_with_another_disk_is_refused(tmp_path, single_rank, without_patience):
    """A rank on a disk without rank 0's file is refused, even if it has a file of another start."""
    own_disk = tmp_path / "ours"
    other_disk = tmp_path / "theirs"
    own_disk.mkdir(), other_disk.mkdir()
    token = create_token_file(own_disk)
    # its name is drawn, and so another one
    create_token_file(other_disk)
    with pytest.raises(
        UserError, match="is not the folder that rank 0 has on .*a disk that they share"
    ):
        check_ranks(other_disk, token, rank0_fingerprint={}, rank_fingerprint={})


def test_a_disk_that_shows_new_files_late_is_waited_for(tmp_path, single_rank):
    """Rank 0's file may appear 0.3 s late on a shared disk; a rank waits up to 30 s for it."""
    token = create_token_file(tmp_path)
    (tmp_path / token).unlink()
    late_write = threading.Timer(0.3, (tmp_path / token).touch)
    late_write.start()
    check_ranks(tmp_path, token, rank0_fingerprint={}, rank_fingerprint={})
    late_write.join()


def test_a_machine_that_was_started_with_other_arguments_is_named(tmp_path, single_rank):
    """A rank with another fingerprint than rank 0 is refused by machine, rank and first difference.

    `beta` comes first by the alphabet.
    """
    token = create_token_file(tmp_path)
    message_naming_the_rank = (
        rf"on {socket.gethostname()} \(rank 0\) the run .* beta: 0 -> 1 \(and 1 more\)"
    )
    with pytest.raises(UserError, match=message_naming_the_rank):
        check_ranks(
            tmp_path,
            token,
            rank0_fingerprint={"seed": "1", "beta": "0"},
            rank_fingerprint={"seed": "2", "beta": "1"},
        )


def test_the_first_rank_that_differs_is_named():
    """The first rank that has other settings or another folder than rank 0 is named."""
    equal_rank = RankView(machine="one", shares_folder=True, differences=[])
    rank_with_other_data = RankView(
        machine="two", shares_folder=True, differences=["dataset: a -> b"]
    )
    assert describe_rank_mismatch([equal_rank, equal_rank], Path("out")) is None
    problem = describe_rank_mismatch([equal_rank, rank_with_other_data], Path("out"))
    assert "on two (rank 1) the run is not the one of rank 0: dataset: a -> b;" in problem
    problem = describe_rank_mismatch(
        [equal_rank, equal_rank, RankView(machine="two", shares_folder=False, differences=[])],
        Path("out"),
    )
    assert problem.startswith(
        "output_dir: 'out' on two (rank 2) is not the folder that rank 0 has on one;"
    )


# ------------------------------------------------------------------------------------ a shared disk


def test_machines_that_share_the_cache_build_a_model_once(tmp_path, monkeypatch):
    """Two machines that need the same built-in model at once build it once; the second one waits.

    Two threads stand for the machines, and `build` for the training of the model.
    """
    monkeypatch.setenv("ADORA_VL_HOME", str(tmp_path / "home"))
    built = []
    both_ready = threading.Barrier(2)
    both_building = threading.Barrier(2)
    plan = asdict(TextStart())

    def build(folder: Path, *_: Any) -> None:
        """Note the folder, and write a finished model of the current plan into it."""
        built.append(folder)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_building.wait(0.5)  # seconds for the other thread, which must not come here
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").touch()
        (folder / "build.json").write_text(json.dumps({"plan": plan}))

    def resolve_tiny_text() -> None:
        both_ready.wait()
        builtin_data.resolve_model("tiny_text")

    monkeypatch.setattr(builtin_data, "train_and_save", build)
    threads = [threading.Thread(target=resolve_tiny_text) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [tmp_path / "home" / "tiny_text"]


def test_a_small_model_of_an_older_plan_is_built_again(tmp_path, monkeypatch, subtests):
    """A built-in model whose `build.json` lacks the current plan is built again, once.

    The plan is the settings with which the model is trained.
    """
    plan = asdict(TextStart())
    # contents of `build.json`: another plan, no plan, no dictionary, and no such file
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

            monkeypatch.setattr(builtin_data, "train_and_save", build)
            for _ in range(2):  # the second time it is up to date
                assert builtin_data.resolve_model("tiny_text") == str(folder)
            assert built == [folder], "once, and not again"


def test_processes_of_equal_number_do_not_write_into_each_others_file(tmp_path, monkeypatch):
    """Two processes of one number that replace a file at once leave a whole file, and nothing else.

    Two machines, or two containers, count their processes from 1.
    """
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
    """A file that another machine wrote is in the manifest, though it appears here after 0.3 s.

    The folder's list of files never shows it here, as a client of NFS may have it.
    """
    checkpoint = stage_checkpoint(tmp_path)
    monkeypatch.setattr(store, "file_names_below", lambda folder: ["mine"])
    late_write = threading.Timer(0.3, (checkpoint / "theirs").write_text, ["2"])
    late_write.start()
    publish_checkpoint(
        checkpoint,
        final=tmp_path / "checkpoint-3",
        metadata={"step": 3},
        written_files={"mine", "theirs"},
    )
    late_write.join()
    assert read_checkpoint_manifest(tmp_path / "checkpoint-3")["files"].keys() == {"mine", "theirs"}


def test_a_checkpoint_without_the_part_of_a_machine_never_gets_its_name(tmp_path, monkeypatch):
    """The other machine's file `theirs` never appears: an error, and no checkpoint-3."""
    monkeypatch.setattr(store, "wait_until_visible", lambda path: path.exists())
    with pytest.raises(FileNotFoundError, match="a file of another machine does not appear here"):
        publish_checkpoint(
            stage_checkpoint(tmp_path),
            final=tmp_path / "checkpoint-3",
            metadata={"step": 3},
            written_files={"mine", "theirs"},
        )
    assert not (tmp_path / "checkpoint-3").exists()


# --------------------------------------------------------------------------- a machine that is lost

# the errors of torch's process groups when another process is gone
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
    """A lost connection of gloo or NCCL becomes one line in training, in a save and in the command.

    Other errors are not taken for one.
    """
    for number, error_words in enumerate((GLOO_CLOSED, GLOO_RESET, NCCL_EXITED)):
        with subtests.test(error_words):

            def lose_contact(*_: object, error_words: str = error_words) -> Any:
                raise RuntimeError(f"{error_words}\nframe #0: c10d::ProcessGroup")

            run_error_expected = pytest.raises(
                RunError,
                match="step 4: another process has ended, or its machine cannot be reached",
            )
            with (
                run_error_expected,
                errors_with_step(lambda: 3, lambda: "the same command goes on from checkpoint-3"),
            ):
                lose_contact()
            writer = CheckpointWriter(
                tmp_path / str(number), max_checkpoints=None, accelerator=Accelerator(cpu=True)
            )
            with pytest.raises(
                RunError, match="checkpoint-3 could not be written .*cannot be reached"
            ) as caught:
                writer.write(3, lose_contact)
            assert len(str(caught.value).splitlines()) == 1
            monkeypatch.setattr("adora_vl.train.train", lose_contact)
            assert main(["--config", "configs/train/smoke_cpu.yaml"]) == 1
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith("error: outside the training: another process has ended")
            assert error_words in last
    assert not lost_contact_message(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_contact_message(ValueError("Connection closed by peer"))


# -------------------------------------------------------------------------------------- the scripts


def write_program(folder: Path, name: str, text: str) -> None:
    """Write a shell script that the scripts in `setup/` find instead of a program of this name."""
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def run_script(
    name: str, *arguments: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of `setup/` in a folder whose programs come first on PATH."""
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(REPOSITORY / "setup" / name), *arguments],
        cwd=folder,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def printed_launch(host: str, port: int) -> str:
    """Return the arguments of the first of two machines' launcher, each followed by `|`."""
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
def slurm_folder(tmp_path):
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


def test_a_slurm_job_starts_each_node_and_queues_itself_again_when_it_was_stopped(slurm_folder):
    """A Slurm job starts the launcher on each node, and queues itself again after a stopped run.

    A stopped run leaves `stopped.json`. The job then ends with 75.
    """
    write_program(
        slurm_folder,
        "launch",
        'printf "%s|" "$@"; echo; mkdir -p out; echo {} >out/stopped.json; exit 1',
    )
    arguments = ["--config", "a b.yaml", "--output_dir", "out"]
    process = run_script(
        "slurm/train.sbatch",
        *arguments,
        folder=slurm_folder,
        SLURM_SUBMIT_DIR=str(slurm_folder),
        LAUNCH="./launch",
        **SLURM_VARIABLES,
    )
    first, second, *_ = process.stdout.splitlines()
    assert first == printed_launch("n1", 22345)  # 20000 + the last digits of job 12345
    assert second == first.replace("--machine_rank|0", "--machine_rank|1")
    assert process.returncode == 75
    assert (slurm_folder / "requeued").read_text() == "12345\n"


def test_both_scripts_divide_the_cores_among_the_processes_of_a_machine(slurm_folder):
    """Both scripts divide a machine's cores among its processes, unless OMP_NUM_THREADS is set.

    Otherwise an optimizer in host memory would work on the one thread that accelerate gives.
    """
    write_program(slurm_folder, "launch", "echo threads $OMP_NUM_THREADS")
    threads_variable = "OMP_NUM_THREADS"
    variables = {"SLURM_SUBMIT_DIR": str(slurm_folder), "LAUNCH": "./launch", **SLURM_VARIABLES}
    for name, cores, threads in (
        ("SLURM_CPUS_ON_NODE", "96", 12),  # 96 cores among 8 processes
        ("SLURM_CPUS_ON_NODE", "4", 1),  # fewer cores than processes
        (threads_variable, "5", 5),  # the user's own number
    ):
        process = run_script(
            "slurm/train.sbatch",
            "--output_dir",
            "out",
            folder=slurm_folder,
            **variables,
            **{name: cores},
        )
        assert process.stdout.split() == ["threads", str(threads)] * 2, process.stderr

    write_program(slurm_folder, "ssh", 'shift 3; eval "$*"')
    write_program(slurm_folder, "nproc", "echo 64")
    for extra_variables, threads in (
        ({}, 16),  # 64 cores among 4 processes
        ({"ENVIRONMENT": "OMP_NUM_THREADS=3"}, 3),
    ):
        environment = {
            "HOSTS": "one",
            "LAUNCH": "./launch",
            "PROCESSES_PER_NODE": "4",
            **extra_variables,
        }
        process = run_script(
            "ssh/train.sh",
            "--output_dir",
            "out",
            folder=slurm_folder,
            **environment,
        )
        assert process.stdout.split() == ["one:", "threads", str(threads)], process.stderr


def test_a_slurm_job_that_fails_is_not_queued_again(slurm_folder):
    """A Slurm job whose run fails is not queued again, even if an earlier stop has left its note.

    Otherwise the job would be queued for ever. Without `--output_dir` it ends with 2.
    """
    (slurm_folder / "out").mkdir()
    (slurm_folder / "out" / "stopped.json").touch()
    write_program(slurm_folder, "launch", "exit 1")
    environment = {**SLURM_VARIABLES, "SLURM_SUBMIT_DIR": str(slurm_folder), "LAUNCH": "./launch"}
    process = run_script(
        "slurm/train.sbatch", "--output_dir=out", folder=slurm_folder, **environment
    )
    assert process.returncode == 1
    assert not (slurm_folder / "requeued").exists()

    process = run_script(
        "slurm/train.sbatch",
        "--config",
        "a.yaml",
        folder=slurm_folder,
        **environment,
    )
    assert process.returncode == 2
    assert "--output_dir: not among the arguments" in process.stderr


def test_port_0_is_refused_for_machines_that_meet_over_ssh(tmp_path):
    """Port 0 would become another port on each machine; the script ends with 2."""
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
def ssh_folder(tmp_path):
    """Write a program `ssh` that runs each host's command on this machine; return its folder."""
    write_program(tmp_path, "ssh", 'shift 2; export HOST="$1"; exec bash -c "$2"')
    return tmp_path


def test_over_ssh_each_machine_gets_its_rank_and_what_the_processes_need(ssh_folder):
    """Over ssh each machine's launcher has its own rank, and the variables of ENVIRONMENT.

    Host and rank are all in which the two launchers differ.
    """
    write_program(ssh_folder, "launch", 'printf "%s|" "$HOST" "$NCCL_SOCKET_IFNAME" "$@"; echo')
    environment = {
        "HOSTS": "one two",
        "LAUNCH": "./launch",
        "ENVIRONMENT": "NCCL_SOCKET_IFNAME=eth1",
    }
    process = run_script(
        "ssh/train.sh",
        "--config",
        "a b.yaml",
        "--output_dir",
        "out",
        folder=ssh_folder,
        **environment,
    )
    first, second = sorted(process.stdout.splitlines())
    assert process.returncode == 0, process.stderr
    assert first == "one: one|eth1|" + printed_launch("one", 29500)  # the script's port
    assert second == first.replace("one: one", "two: two").replace(
        "--machine_rank|0", "--machine_rank|1"
    )


def test_over_ssh_a_machine_that_fails_ends_the_others(ssh_folder):
    """A machine that fails over ssh ends the script with its code, and the other machines.

    They would wait for its processes, so they are killed after GRACE seconds.
    """
    write_program(ssh_folder, "launch", 'if [ "$HOST" = two ]; then exit 3; fi; sleep 55 & wait')
    environment = {"HOSTS": "one two", "LAUNCH": "./launch", "GRACE": "0"}
    process = run_script(
        "ssh/train.sh",
        "--output_dir",
        "out",
        folder=ssh_folder,
        **environment,
    )
    assert process.returncode == 3
    assert "two ended with 3; the others have 0 seconds to end" in process.stderr


def test_over_ssh_a_stopped_run_ends_with_75(ssh_folder):
    """A run that leaves `stopped.json` ends with 75, as in a Slurm job."""
    write_program(ssh_folder, "launch", "mkdir -p out; touch out/stopped.json; exit 1")
    process = run_script(
        "ssh/train.sh", "--output_dir", "out", folder=ssh_folder, HOSTS="one two", LAUNCH="./launch"
    )
    assert process.returncode == 75


def test_over_ssh_a_stop_in_the_first_moment_is_not_lost(ssh_folder):
    """A stop takes effect even before the launcher on a machine has noted its process number."""
    write_program(ssh_folder, "launch", "exec sleep 300")
    write_program(
        ssh_folder,
        "ssh",
        'shift 2; case "$2" in *launch*) touch starting; sleep 1 ;; esac; exec bash -c "$2"',
    )
    script = subprocess.Popen(
        ["bash", str(REPOSITORY / "setup" / "ssh" / "train.sh"), "--output_dir", "out"],
        cwd=ssh_folder,
        env={"PATH": f"{ssh_folder}:{os.environ['PATH']}", "HOSTS": "one", "LAUNCH": "./launch"},
    )
    while not (ssh_folder / "starting").exists():
        assert script.poll() is None
        time.sleep(0.02)
    script.terminate()
    assert script.wait(100) == 128 + signal.SIGTERM


# --------------------------------------------------------------------------- one machine's programs


def test_programs_of_an_environment_that_was_not_activated_are_found(
    monkeypatch, tmp_path, subtests
):
    """A program beside the interpreter is found by its name, though it is not on PATH.

    DeepSpeed calls `ninja` by name.
    """
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin", "ninja", "echo own ninja")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    for path in ("/usr/bin:/bin", "", None):
        with subtests.test(f"{path}"):
            monkeypatch.delenv("PATH") if path is None else monkeypatch.setenv("PATH", path)
            for _ in range(2):  # the engine's environment may be prepared more than once
                put_environment_first_on_path()
            assert (
                subprocess.run(["ninja"], capture_output=True, text=True, check=True).stdout
                == "own ninja\n"
            )
            assert os.environ["PATH"].split(os.pathsep).count(str(tmp_path / "bin")) == 1


def test_a_single_process_takes_the_first_gpu_that_the_user_shows_it(monkeypatch, subtests):
    """A single process uses the first GPU that CUDA_VISIBLE_DEVICES shows, or GPU 0 without it.

    With several processes, or with no GPU shown, the variable stays what it was.
    """
    cases = [  # CUDA_VISIBLE_DEVICES, number of processes, CUDA_VISIBLE_DEVICES afterwards
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
    """A free port is below the range that the system gives to connections, and not in use.

    Ports of that range could be taken before they are used.
    """
    ports = {free_port() for _ in range(20)}
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_of_range = int(range_file.read_text().split()[0]) if range_file.exists() else 32_768
    assert len(ports) > 10, "of 20 that were drawn; some may be equal"
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
