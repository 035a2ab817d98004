"""The per-node I/O daemon and its client: bytes, frames, extents, requests. Never tensors, never torch."""
