"""Measurements of fa3 beside the other attention libraries of the same machine. See README.md."""
