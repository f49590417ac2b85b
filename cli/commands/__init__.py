"""The sub-commands of `dcnr`, one module for each family; see cli.tree for how they are imported."""
