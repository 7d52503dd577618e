"""The HTTP application of an engine that answers for fronts in other processes (docs/wire.md)."""
