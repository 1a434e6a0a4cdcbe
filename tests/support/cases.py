"""A fixture for tests that try a table of cases: each case is a subtest with an empty folder."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

# Takes the name of a case, and returns a context manager: a subtest, which yields its folder.
CaseFolder = Callable[[object], AbstractContextManager[Path]]


@pytest.fixture
def case_folder(tmp_path: Path, subtests: pytest.Subtests) -> CaseFolder:
    """Return a function that runs a case as a subtest: `with case_folder("csv") as folder: ...`.

    `folder` is a new empty folder for this case. A case that fails is listed by its name, and the
    other cases run all the same.
    """

    @contextmanager
    def run_subtest(name: object) -> Iterator[Path]:
        folder = tmp_path / f"case-{len(list(tmp_path.glob('case-*')))}"
        folder.mkdir()
        with subtests.test(f"{name!s:.80}"):
            yield folder

    return run_subtest
