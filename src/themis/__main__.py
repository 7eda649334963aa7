"""`python -m themis`."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    # `python -m` puts the current folder first, where any file in it could take the place of a package.
    del sys.path[0]

from themis.cli import main

sys.exit(main())
