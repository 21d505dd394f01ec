"""NAR bytes: writer, reader, zstd, narinfo, signing, bundles, the object store, grant tokens. Layer: rank 1."""
