"""The build graph in PostgreSQL: schema, statements, the graph writer, transitions, counters, recovery.

Layer: rank 2. The only importer of psycopg; knows neither the wire nor a Nix daemon.
"""
