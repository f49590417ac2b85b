"""What a network is: the file format, node types, shapes and cost, and the networks that come with DCNR.

The way of a file: `yaml_source` (text -> tree with places) -> `overrides` (`--set`) -> `document` (sections, checked
by `model`, `recipe` and the node types through `values`) -> `scopes` (names and ports) -> `expand` (blocks written
out) -> `assemble` (order, ties, shapes, costs) -> `graph.Graph`, in a `network.Network`. `load.load` does all of it;
every error on the way goes to `diagnostics`, so that one run shows them all.
"""
