"""The engine: the only Trio below the server."""
