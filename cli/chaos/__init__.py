"""Hurting a cluster of real processes on purpose, and seeing that its run ends as if nothing had happened.

`faults` is the pure schedule: one seed says what is done when. `gate` is a TCP proxy before each process, `zmtp` lets
it know who speaks. `fleet` starts, kills and pauses processes; `sight` judges what the run shows; `engine` does it all
in one event loop. `reference` is the undisturbed run. `dcnr chaos` and tests/chaos share every part.
"""
