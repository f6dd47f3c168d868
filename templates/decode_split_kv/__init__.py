"""Split-KV decoding in Triton: programs share the keys, and a second kernel combines the parts."""
