"""NAR bytes: writer, reader, zstd, narinfo, signing, bundles, object store, grant tokens. Layer: rank 1."""
