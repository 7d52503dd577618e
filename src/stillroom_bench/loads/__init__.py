"""On what: questions, documents and requests, made or from data sets."""
