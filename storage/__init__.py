"""DCNR."""
