"""Is a knowledge base whole: SQLite, vectors and postings, each and against the others."""
