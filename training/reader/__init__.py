"""Trains the bundled extractive reader."""
