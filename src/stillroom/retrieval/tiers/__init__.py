"""Inverted lists on devices, in RAM and in a file, and a model of the time of their searches."""
