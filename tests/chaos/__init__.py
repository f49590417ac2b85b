"""Real processes, real faults: see `cli.chaos`. `python -m tests.chaos` is the mass campaign."""
