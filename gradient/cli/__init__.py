"""The commands: thin, no logic of the product. Layer: rank 6."""
