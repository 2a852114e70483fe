"""Operators over the devices of a mesh."""
