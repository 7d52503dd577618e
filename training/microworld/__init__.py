"""A second microworld: longer documents, in which a fact can stand far behind the chunk that names its subject."""
