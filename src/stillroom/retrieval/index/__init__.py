"""What is searched: dense and sparse indexes, in memory, in files and on a server."""
