"""A checkpoint's files as the server checks them: a fixed set of names, regular files, lengths and digests.

A client may have written the manifest, so it is compared with the files and never followed: no name in it becomes a
path unless it is in `FILES`, nothing is read through a link or from a pipe or device, and JSON is read up to a limit.
The engine checks all this again, and whether the tensors fit the model.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tinsmith.errors import InvalidInputError

ADAPTER, ADAPTER_CONFIG, OPTIMIZER, MANIFEST = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "manifest.json",
)
FILES = frozenset({ADAPTER, ADAPTER_CONFIG, OPTIMIZER, MANIFEST})
"""The files that a checkpoint may have."""
NEEDED = FILES - {OPTIMIZER}
TENSORS = frozenset({ADAPTER, OPTIMIZER})

MAX_JSON_BYTES = 256 * 1024
"""Limit of the manifest and of adapter_config.json; those of an 80-layer model have 20 KB."""
MAX_HEADER_BYTES = 2 * 1024 * 1024
"""Limit of a safetensors header; that of an 80-layer model has 200 KB."""
MAX_DIMENSIONS = 8
MAX_SIZE = 2**48
"""Limit of a dimension and of an offset."""
MAX_TENSOR_NAME = 512
BLOCK_BYTES = 1 << 20

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

StopCheck = Callable[[], None]
"""Called between two blocks of a file; raises to stop the work."""


class FileRecord(msgspec.Struct, frozen=True):
    """Length and SHA-256 of a file, computed by the server."""

    size_bytes: int
    sha256: str


class _Listed(msgspec.Struct, frozen=True):
    """A file in a manifest, with its length."""

    sha256: str
    bytes: int | None = None


class _Adapter(msgspec.Struct, frozen=True):
    """What a manifest says about the adapter; engines differ in where they put it."""

    base_model: str | None = None
    rank: int | None = None
    alpha: float | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None


class _Manifest(msgspec.Struct, frozen=True):
    files: Annotated[dict[str, _Listed | str], msgspec.Meta(max_length=len(FILES))]
    base_model: str | None = None
    info: _Adapter | None = None
    lora: _Adapter | None = None


_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: Literal[tuple(DTYPE_BYTES)]  # type: ignore[valid-type]
    shape: Annotated[list[_Size], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Size, _Size]


def read_records(check: StopCheck, directory: Path) -> dict[str, FileRecord]:
    """Return length and digest of every file of a directory; raises for a file that no checkpoint has."""
    names = sorted(os.listdir(directory))
    unknown = [name for name in names if name not in FILES]
    if unknown:
        raise InvalidInputError(f"files: {unknown[0][:100]!r} is not one of {', '.join(sorted(FILES))}", field="files")
    return {name: _record(directory / name, check) for name in names}


def check_checkpoint(directory: Path, records: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    """Check that the files are a checkpoint, and fit `facts`: base model, rank, alpha, switches."""
    missing = sorted(NEEDED - set(records))
    if missing:
        raise InvalidInputError(
            f"files: {missing[0]} is missing (a checkpoint has {', '.join(sorted(FILES))})", field="files"
        )
    _check_manifest(_decoded(directory, MANIFEST, _Manifest), records, facts)
    _decoded(directory, ADAPTER_CONFIG, dict[str, msgspec.Raw])
    for name in sorted(TENSORS & set(records)):
        _check_tensors(directory / name)


def is_intact(check: StopCheck, directory: Path) -> bool:
    """Whether every file that the manifest lists has the listed digest."""
    try:
        listed = _listed(_decoded(directory, MANIFEST, _Manifest))
        for name, (sha256, size_bytes) in listed.items():
            if name not in FILES or _record(directory / name, check, size_bytes).sha256 != sha256:
                return False
    except (OSError, InvalidInputError):
        return False
    return True


def digest_of_files(records: Mapping[str, FileRecord]) -> str:
    """Return a digest of a checkpoint's contents."""
    return digest_of_digests({name: record.sha256 for name, record in records.items()})


def digest_of_digests(digests: Mapping[str, str]) -> str:
    parts = "".join(f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(parts.encode()).hexdigest()


def _listed(manifest: _Manifest) -> dict[str, tuple[str, int | None]]:
    return {
        name: (record, None) if isinstance(record, str) else (record.sha256, record.bytes)
        for name, record in manifest.files.items()
    }


def _check_manifest(manifest: _Manifest, records: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> None:
    listed = _listed(manifest)
    names = set(records) - {MANIFEST}
    if set(listed) != names:
        other = sorted(set(listed) ^ names)[0]
        where = "lists it, but it was not sent" if other in listed else "does not list it"
        raise _wrong(MANIFEST, f"{other[:100]!r}: the manifest {where}")
    for name, (sha256, size_bytes) in listed.items():
        record = records[name]
        if sha256 != record.sha256 or size_bytes not in (None, record.size_bytes):
            raise _wrong(name, "is not the file that the manifest lists: its length or SHA-256 differs")
    said = [manifest.info or _Adapter(), manifest.lora or _Adapter(), _Adapter(base_model=manifest.base_model)]
    for name, value in facts.items():
        for adapter in said:
            if getattr(adapter, name) not in (None, value):
                text = f"says {name} {str(getattr(adapter, name))[:100]!r}, the request {str(value)[:100]!r}"
                raise _wrong(MANIFEST, text)


def _check_tensors(path: Path) -> None:
    """Check a safetensors file: known types, and tensors that fill the file exactly."""
    with _opened(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or length > min(MAX_HEADER_BYTES, size_bytes - 8):
            raise _wrong(path.name, f"is not a safetensors file: its header cannot have {length} bytes")
        table = _json(file.read(length), dict[str, msgspec.Raw], path.name)
    table.pop("__metadata__", None)
    tensors = {name: _json(bytes(raw), _Tensor, path.name) for name, raw in table.items()}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if len(name) > MAX_TENSOR_NAME or not name.isprintable():
            raise _wrong(path.name, f"has a tensor with an invalid name, {name[:100]!r}")
        first, last = tensor.data_offsets
        if first != end or last - first != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
            raise _wrong(path.name, f"is damaged: the offset, type or shape of tensor {name[:100]!r} is wrong")
        end = last
    if not tensors or 8 + length + end != size_bytes:
        raise _wrong(
            path.name, f"is damaged: it has {size_bytes} bytes, but its header and tensors take {8 + length + end}"
        )


def _decoded(directory: Path, name: str, kind: Any) -> Any:
    with _opened(directory / name) as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise _wrong(name, f"is larger than {MAX_JSON_BYTES} bytes")
    return _json(data, kind, name)


def _json(data: bytes, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong(name, f"cannot be read: {str(error)[:200]!a}") from None
    except RecursionError:
        raise _wrong(name, "is nested too deeply") from None


def _record(path: Path, check: StopCheck, expected_bytes: int | None = None) -> FileRecord:
    """Read a file up to the length that it had at the beginning."""
    digest = hashlib.sha256()
    with _opened(path) as file:
        left = size_bytes = os.fstat(file.fileno()).st_size
        if expected_bytes not in (None, size_bytes):
            raise _wrong(path.name, f"has {size_bytes} bytes, not {expected_bytes}")
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            check()
            digest.update(block)
            left -= len(block)
    return FileRecord(size_bytes, digest.hexdigest())


def _opened(path: Path) -> Any:
    """Open a regular file; opening anything else could block forever, or read something else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _wrong(path.name, "is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _wrong(name: str, text: str) -> InvalidInputError:
    return InvalidInputError(f"files: {name} {text}", field="files")
