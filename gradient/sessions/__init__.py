"""The server's end of the protocol: one session a worker. Layer: rank 4."""
