"""Runs that exist: read one, list many, say what differs between two. Reads only, and loads nothing heavy."""
