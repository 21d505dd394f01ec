"""The worker's end of the protocol, and every store operation. Layer: rank 3; imports no psycopg."""
