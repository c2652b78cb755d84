"""The HTTP front: routes, keys, streams."""
