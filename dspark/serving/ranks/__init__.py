"""Several processes that decode as one: each has a slice of the target and the same graph."""
