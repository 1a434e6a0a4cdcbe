"""The policy's weights as safetensors in a folder that trainer and servers both see."""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from weakref import finalize

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from adora_vl.checkpoint.trl_state import save_tensors
from adora_vl.models.load import ADAPTER
from adora_vl.utils.files import abandoned, locked_folder, replace_file, unwritable

KEY = "adora_weight_transfer"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"


class WeightFiles:
    """Folders `adora-weights-RUN-RANDOM`, whose names servers get with a request to read them.

    A folder exists only while it is written and read. One with an adapter stays until the next one
    was read: vLLM reads it again where another adapter took its place, and a server that does not
    find it dies.

    One process of a run writes. Other runs may have their weights in the same folder, which stay,
    also those of a container whose machine and `output_dir` have the same names. Servers read a
    folder as they read a checkpoint, so any network and any number of them will do.
    """

    def __init__(self, folder: Path, output_dir: Path) -> None:
        """Remove the files of a killed run with the same `output_dir`; nothing is written yet.

        `folder` is created when it is first written to. The lock of a file tells that no process
        uses it.
        """
        self.folder = folder.absolute()
        # two machines may each have a disk with such a path
        run = f"{socket.gethostname()}:{output_dir.resolve()}"
        self._name = f"adora-weights-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        # with the rights that its owner gave it, so it stays
        self._was_there = self.folder.exists()
        # rank of the adapter that is written in PEFT's format; None: whole tensors are written
        self.adapter_rank: int | None = None
        self._previous_adapter = ExitStack()  # removes the adapter that servers have
        finalize(self, self._previous_adapter.close)
        for path in abandoned(self.folder.glob(f"{self._name}-*")):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def written(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
        """Write named tensors, copied one by one, and yield the folder in which servers read them.

        All of `tensors` is consumed, also after an error, as other ranks take part in gathering
        each. Raises `UserError` where the disk refuses.
        """
        remaining = iter(tensors)
        with ExitStack() as stack:
            try:
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                path, lock = locked_folder(lambda: self.folder / f"{self._name}-{token_hex(8)}")
                stack.callback(_remove, path, lock, not self._was_there)
                rights = _rights_in(self.folder)
                path.chmod(rights)
                if self.adapter_rank is None:
                    save_tensors(remaining, path)
                else:
                    save_file(
                        {name: tensor.to("cpu").contiguous() for name, tensor in remaining},
                        path / _ADAPTER_WEIGHTS,
                    )
                    config = {
                        "r": self.adapter_rank,
                        "lora_alpha": self.adapter_rank,
                        "target_modules": [],
                    }
                    replace_file(path / ADAPTER, json.dumps(config))
                for file in path.iterdir():
                    file.chmod(rights & 0o640)
            except (OSError, SafetensorError) as error:
                raise unwritable(KEY, self.folder, error) from error
            finally:
                for _ in remaining:
                    pass
            yield path
            if self.adapter_rank is not None:
                # Servers hold this adapter until the next one: its folder outlives the block, and
                # that of the previous one goes.
                self._previous_adapter.close()
                self._previous_adapter.push(stack.pop_all())


def _remove(path: Path, lock: int | None, last: bool) -> None:
    """Remove `path` and its lock.

    `last`: remove the parent folder too, unless another run has weights there.
    """
    shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)
    if last:
        with suppress(OSError):
            path.parent.rmdir()


def _rights_in(folder: Path) -> int:
    """Return the permissions of a run's folder: the trainer's user alone may use it.

    Its group may read it too, if `folder` is open to the group and to nobody else.
    """
    return 0o750 if folder.stat().st_mode & 0o057 == 0o050 else 0o700
