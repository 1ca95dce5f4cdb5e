"""Messages to bytes and back: JSON, protobuf and zstd.

Decoding is strict and bounded: a few hostile bytes cannot cost much memory or time. `json_codec` serves most routes;
the `proto_*` files serve the hot ones.
"""
