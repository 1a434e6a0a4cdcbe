"""`python -m data_prep`."""

from __future__ import annotations

import sys

from adora_vl.commands import imports

if __name__ == "__main__":
    with imports():
        from data_prep.cli import main
    sys.exit(main())
