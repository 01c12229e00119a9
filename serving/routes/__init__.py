"""One file an endpoint, or a few that belong together; each lists its own in ROUTES."""
