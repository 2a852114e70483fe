"""Serving: the table of a serving step, pools of states and their slots, decodes, and rings."""
