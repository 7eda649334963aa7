"""`python -m themis`."""

import sys

from themis.cli import main

sys.exit(main())
