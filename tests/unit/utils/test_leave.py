"""A run ends without the interpreter's finalization, in which a thread of gloo may abort it."""

import subprocess
import sys

_LEAVING_SCRIPT = """
import atexit, os, sys, threading, time
import {library}
from adora_vl.utils.launch import exit_without_finalization

class SeesFinalization:
    def __init__(self): self.write = os.write
    def __del__(self): self.write(1, b"finalized\\n")

def work():
    said.wait()
    time.sleep(0.2)  # so that it is still at work when the process ends
    print("thread ended")

kept, said = SeesFinalization(), threading.Event()
atexit.register(lambda: print("exit function ran"))
threading.Thread(target=work).start()
print("last words", end="\\n")
said.set()
{ending}(3)
"""


def run_ending_script(ending: str, library: str = "torch") -> tuple[int, list[str]]:
    """Return the exit code and the printed lines of a process that ends by this function.

    `library`: what it has imported.
    """
    command = [sys.executable, "-c", _LEAVING_SCRIPT.format(ending=ending, library=library)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return process.returncode, process.stdout.splitlines()


def test_everything_of_an_exit_but_finalization_happens():
    """`exit_without_finalization` waits for threads and exit functions, as `sys.exit` does.

    Only the last line of `sys.exit`, that of the interpreter's end, is missing.
    """
    output_of_exit = run_ending_script("sys.exit")
    # 3: the exit code that the script is given
    assert output_of_exit == (3, ["last words", "thread ended", "exit function ran", "finalized"])
    assert run_ending_script("exit_without_finalization") == (3, output_of_exit[1][:-1])
    assert run_ending_script("exit_without_finalization", library="json") == output_of_exit, (
        "without torch, as where only the help was asked for"
    )
