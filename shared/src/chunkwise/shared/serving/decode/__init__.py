"""The kernel that decodes, for an operator alone and for all of a layer between its projections; and its choice."""
