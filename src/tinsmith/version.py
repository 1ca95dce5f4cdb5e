"""The package's version, and the newest protocol it speaks."""

__version__ = "0.1.0"

PROTOCOL_VERSION = "0.36.0"
"""The release of the official SDK whose wire this package matches; older ones down to 0.3.0 are understood."""
