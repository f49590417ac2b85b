"""The service that knows the cluster: registry, PNode membership, placement, sessions, commits.

It computes on no tensors and is not in the loop of a training step. Decisions are pure (`placement`, `membership`,
`sessions`, `commits`): events and the time go in, commands come out; `service` carries them out.
"""
