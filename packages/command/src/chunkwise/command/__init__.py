"""The command `chunkwise`: a demo, a check of a machine, a report about it, and the shapes of real models."""

from chunkwise.shared import version

__version__ = version.of(__name__)
