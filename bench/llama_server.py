"""Serves a GGUF file with llama.cpp's own server until its input ends: `llama_server.py FILE SLOTS CONTEXT THREADS`.

Runs in the environment .clients/llama-cpp and imports nothing of ours. Prints its address, and then what it uses of the
processor.
"""

from __future__ import annotations

import sys

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    file, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    print(xllamacpp.get_system_info(), flush=True)
    sys.stdin.read()


main()
