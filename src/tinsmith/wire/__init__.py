"""What crosses HTTP: message types, tensors, codecs and the endpoint table. No I/O in here."""
