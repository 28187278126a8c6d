"""HTTP/1.1 of our own for the hot path, on httptools (llhttp's binding)."""
