"""What the server does again and again: assignment and waiting, the check, the collection. Layer: rank 3."""
