"""The remote store: a store behind a process that speaks the wire, for machines that reach neither its disk nor S3.

- `client`: `RemoteStore`, a Store like every other, opened by the URL `dcnr://host:port`.
- `service`, `main`: the other end, `dcnr-storage`, which stands on a folder or on S3.
- `window`, `pieces`, `quota`, `policy`: what is decided, pure. `connection`, `spool`, `cache`: what is done.

Objects travel in chunks, asked for by whoever wants them (or acknowledged by whoever gets them), so the receiver sets
the pace. What the line loses, the link below repeats; what a lost process loses begins where it ended.
"""

SERVICE_ID = "storage"
"""The service's name on the bus."""

CHUNK_BYTES = 128 << 10
"""The most that one message brings: two of them are the least that is under way, so a cut wastes little."""
