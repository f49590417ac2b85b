"""Every limit of what is read from a store, in one place, each with its reason. `wire.limits` has those of messages."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

KEY_CHARS = 512
"""S3 ends at 1,024 bytes, and a local store adds its folder in front."""

SEGMENT_CHARS = 128
"""File systems end at 255 bytes; temporary files need room for more."""

GET_BYTES = 4 * GIB
"""An object that is held in memory; larger ones are read as streams."""

SEALED_BYTES = MIB
"""Heads and terms: a few hundred bytes each."""

RECORD_BYTES = 16 * MIB
"""The orchestrator's records: a session's names the PNode of each VNode."""

MANIFEST_BYTES = 64 * MIB
"""A manifest takes some 120 bytes for each part."""

MANIFEST_PARTS = 100_000
"""A checkpoint has one part per VNode with state, and a network at most so many VNodes."""

ANCESTORS = 1_000_000
"""Manifests that are followed back from a head."""

PART_HEADER_BYTES = 16 * MIB
"""The JSON header of safetensors: some 100 bytes for each tensor."""

PART_TENSORS = 65_536
"""Tensors of one VNode, with the optimizer's."""

TENSOR_NAME_CHARS = 512
TENSOR_DIMS = 16
TENSOR_EXTENT = 1 << 40
"""The three as on the wire, for the same tensors."""
