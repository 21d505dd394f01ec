"""HTTP to the server and to object stores: JSON calls and bulk bytes. Layer: rank 1.

`client.HttpClient` is the way in. The only importer of asks (`json_calls`) and h11.
"""
