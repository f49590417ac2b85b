"""Tests of the command line: pure parts, and commands that need no cluster."""
