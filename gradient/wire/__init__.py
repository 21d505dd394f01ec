"""The protocol between server and worker: messages, codec, handshake, framing. Layer: rank 1.

Pure but for `transport`, the one importer of trio-websocket. Frames and names: docs/protocol.md.
"""
