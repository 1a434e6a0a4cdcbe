"""The policy's weights as safetensors in a folder that trainer and servers both see."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from safetensors import SafetensorError
from torch import Tensor

from adora_vl.checkpoint.library_state import save_tensors
from adora_vl.utils.files import abandoned, locked_folder, unwritable

KEY = "adora_weight_transfer"


class WeightFiles:
    """Folders `adora-weights-RUN-RANDOM`, each there only while it is written and read; servers are told its name.

    One process of a run writes. Other runs may have their weights in the same folder, which stay, also those of a
    container whose machine and `output_dir` have the same names. Servers read a folder as they read a checkpoint, so
    any network and any number of them will do.
    """

    def __init__(self, folder: Path, output_dir: Path) -> None:
        """`folder`: made when it is written to. What this run, known by its `output_dir`, has left there when it was
        killed is removed now: nobody holds its lock.
        """
        self.folder = folder.absolute()
        run = f"{socket.gethostname()}:{output_dir.resolve()}"  # two machines may each have a disk with such a path
        self._name = f"adora-weights-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
        self._was_there = self.folder.exists()  # with the rights that its owner gave it, so it stays
        for path in abandoned(self.folder.glob(f"{self._name}-*")):
            shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def written(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
        """Writes named tensors, which are copied one by one, and yields their folder. It is gone after the block.

        All of `tensors` is gone through in any case, since other ranks take part in each. Raises `UserError` where the
        disk refuses them.
        """
        rest = iter(tensors)
        with ExitStack() as until:
            try:
                self.folder.mkdir(0o700, parents=True, exist_ok=True)
                path, lock = locked_folder(lambda: self.folder / f"{self._name}-{token_hex(8)}")
                until.callback(self._remove, path, lock)
                rights = _rights_in(self.folder)
                path.chmod(rights)
                save_tensors(rest, path)
                for file in path.iterdir():
                    file.chmod(rights & 0o640)
            except (OSError, SafetensorError) as error:
                raise unwritable(KEY, self.folder, error) from error
            finally:
                for _ in rest:
                    pass
            yield path

    def _remove(self, path: Path, lock: int | None) -> None:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if not self._was_there:
            with suppress(OSError):  # another run has weights in it
                self.folder.rmdir()


def _rights_in(folder: Path) -> int:
    """Those of a run's folder: for the trainer's user alone, unless `folder` was opened to its group alone."""
    return 0o750 if folder.stat().st_mode & 0o057 == 0o050 else 0o700
