"""Serving: the table of a step, pools of states and their slots, decodes, and rings."""
