"""`python -m shardfit`."""

import sys

from shardfit.cli.main import main

sys.exit(main())
