"""`python -m asyncrl` is `asyncrl`."""

import sys

from asyncrl.cli import main

sys.exit(main())
