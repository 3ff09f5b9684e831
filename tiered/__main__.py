"""`python -m tiered` is the command `tiered`."""

from tiered.cli import main

raise SystemExit(main())
