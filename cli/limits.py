"""Every limit of the files that the command line itself reads, in one place."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30

HOME_FILE_BYTES = MIB
"""contexts.json, cluster.json and orchestrator.json: a few hundred bytes for each process or context."""

INPUT_BYTES = GIB
"""An array for `dcnr infer`, and what a compressed one unpacks to."""
