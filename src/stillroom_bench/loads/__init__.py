"""Workloads: questions, documents and requests, generated or read from data sets."""
