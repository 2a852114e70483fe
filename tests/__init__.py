"""What tests of several folders share: suites, oracles, and what a case reads."""
