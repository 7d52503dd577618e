"""Is a knowledge base whole: SQLite, vectors, postings and uploaded files, each and against the others."""
