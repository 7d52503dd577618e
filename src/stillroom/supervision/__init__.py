"""Engines as child processes: starting, watching and ending them."""
