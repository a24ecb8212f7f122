"""The demo: a small trained DSA model, and fresh documents to ask it about."""
