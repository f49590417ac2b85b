"""The sub-commands of `dcnr`, one module for each family; see cli.main for how they are imported."""
