"""A user's module that cannot be imported."""

raise RuntimeError("the data base is down")
