"""Load generation over HTTP."""
