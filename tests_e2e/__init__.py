"""The tests of the whole, which need several packages."""
