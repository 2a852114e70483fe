"""Layers over several devices and machines: how they are divided, where arrays lie, and how caches move."""
