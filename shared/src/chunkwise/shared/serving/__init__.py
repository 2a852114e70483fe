"""Serving: what a step is, pools of states and their slots, decode, rings."""
