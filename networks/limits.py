"""Every limit of a network's file and of its canonical bytes, in one place, each with its reason."""

from __future__ import annotations

MIB = 1 << 20

YAML_BYTES = 8 * MIB
"""The largest shipped network takes 3 KiB; what is larger is written with blocks."""

YAML_DEPTH = 32
"""Levels of mappings and lists; a network needs 6."""

YAML_VALUES = 500_000
"""Keys and values, each alias counted as all that it stands for: a few lines of aliases can name 2^30 values."""

NUMBER_CHARS = 40
"""Longest number: Python takes quadratic time for very long ones."""

EXPRESSION_CHARS = 500
EXPRESSION_DEPTH = 40
"""Parentheses and powers inside one another: its parser is recursive."""

INTEGER = 2**63 - 1
"""Results of expressions stay below, so that `9**9**9` costs nothing."""

NODES = 100_000
EDGES = 500_000
BLOCK_DEPTH = 8
"""Of a network with all its blocks written out; `repeat` multiplies."""

EXTENT = 1_000_000
"""Largest dimension of an input."""

NETWORK_BYTES = 16 * MIB
"""A network's canonical bytes, as they are stored and sent."""
