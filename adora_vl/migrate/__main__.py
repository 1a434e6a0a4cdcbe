"""`python -m adora_vl.migrate`."""

import sys

from adora_vl.migrate.command import main

sys.exit(main())
