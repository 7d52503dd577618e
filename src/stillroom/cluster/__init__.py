"""Several engines behind one front: which engine gets a request."""
