"""Tests of the network file format."""
