"""Checks and repairs a knowledge base: SQLite, vectors, postings and uploaded files."""
