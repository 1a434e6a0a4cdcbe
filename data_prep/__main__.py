"""`python -m data_prep` and the installed `adora-vl-data`."""

from adora_vl.utils.cli import imports

with imports():
    from data_prep.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
