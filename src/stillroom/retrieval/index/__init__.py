"""Dense and sparse indexes, in memory, in files and on a server."""
