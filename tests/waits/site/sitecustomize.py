"""Imported by every interpreter that has this directory on its path: takes a wait out, in subprocesses too."""

import waits.sites  # noqa: F401
