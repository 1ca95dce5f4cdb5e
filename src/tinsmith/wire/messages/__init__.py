"""The messages of the protocol, grouped by subject.

Each is a frozen struct (`tinsmith.wire.message`) with the field names that the protocol spells. Start with
`training`.
"""
