"""The tree and its releases: packages, versions, archives."""
