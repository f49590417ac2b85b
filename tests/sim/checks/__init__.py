"""The invariants, one idea a file. They read a history only: nothing of the product is imported (a test holds it)."""
