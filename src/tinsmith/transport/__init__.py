"""Bytes to a server and back: over the network, or into an application in the same process.

Does not know: endpoints, wire types, keys, or what a status code means to an operation. Import from the modules;
only `http` loads an HTTP library.
"""
