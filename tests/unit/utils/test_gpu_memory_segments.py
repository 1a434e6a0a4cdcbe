"""Torch's blocks of GPU memory can grow in a run, unless the user has asked for something else."""

import os
import subprocess
import sys
import textwrap

import pytest

from adora_vl.utils.launch import segments_expand

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
PREPARE_BY_COMMAND = """
    import sys
    from adora_vl.config.command import parse_command
    from adora_vl.prepare import prepare
    from adora_vl.utils import launch
    before = launch.use_expandable_segments
    def seen():
        assert "torch" not in sys.modules, "torch may have read its environment"
        before()
        raise InterruptedError("what follows imports torch, and much else")
    prepare.__globals__["use_expandable_segments"] = seen
    try:
        prepare(parse_command(["--model_name_or_path", "tiny"]))
    except InterruptedError:
        pass
    else:
        raise AssertionError("it was never asked for")
"""
PREPARE_BY_PYTHON = """
    import sys
    import adora_vl
    assert "torch" not in sys.modules
    adora_vl.AdoraGRPOConfig
"""
SHOW_ALLOCATOR_SETTINGS = """
    import torch
    print("torch has", torch._C._accelerator_getAllocatorSettings())
"""


OUR_ALLOCATOR_SETTING = "expandable_segments:True"
USERS_ALLOCATOR_SETTING = "max_split_size_mb:64"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prepare_code", "variables", "expected"),
    [
        (PREPARE_BY_COMMAND, {}, OUR_ALLOCATOR_SETTING),
        (
            PREPARE_BY_COMMAND,
            {ALLOCATOR_VARIABLES[0]: USERS_ALLOCATOR_SETTING},
            USERS_ALLOCATOR_SETTING,
        ),
        (PREPARE_BY_PYTHON, {}, OUR_ALLOCATOR_SETTING),
    ],
    ids=["command", "command, set by the user", "Python"],
)
def test_torch_reads_it_unless_the_user_has_set_another(prepare_code, variables, expected):
    """A process prepares a run, and prints the allocator's settings that torch has read."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES
    } | variables
    script = textwrap.dedent(prepare_code) + textwrap.dedent(SHOW_ALLOCATOR_SETTINGS)
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines()[-1] == f"torch has {expected}"


def test_what_the_environment_says_of_it(monkeypatch):
    """Any of torch's variables may switch expandable segments on; the first that is set counts."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not segments_expand()
    monkeypatch.setenv(ALLOCATOR_VARIABLES[1], "max_split_size_mb:64, expandable_segments: True")
    assert segments_expand()
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], "max_split_size_mb:64")
    assert not segments_expand(), "its order"
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], "expandable_segments:False")
    assert not segments_expand()
