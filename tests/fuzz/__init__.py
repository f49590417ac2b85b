"""Broken and hostile input: everything that is received or read, changed at random, over and over.

`python -m tests.fuzz TARGET --cases N` runs a campaign; what breaks is written to `seeds/TARGET/` and from then on is a
test. A case is good if it is read, or refused by an error of ours, within a second and without much memory.
"""
