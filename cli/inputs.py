"""What a person gives a network to read: arrays from files, text from the command line; and what is shown of an answer.

Array files are read without pickle; an object array is refused.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from cli.limits import INPUT_BYTES
from wire.errors import BadFileError, UsageError

Array = NDArray[Any]


def read_arrays(given: Sequence[str], names: Sequence[str]) -> dict[str, Array]:
    """`x.npy`, `x.npz`, `x.json` or `name=x.npy` as arrays by input name. A file without a name is the first input.

    Raises `BadFileError`, `UsageError`.
    """
    found: dict[str, Array] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals or name not in names:
            name, file = "", text
        for key, array in read_file(Path(file).expanduser()).items():
            target = key if key in names else name or names[0]
            found[target] = array
    return found


def read_file(path: Path) -> dict[str, Array]:
    """The arrays of one file; the key is "" where the file gives none."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
            raise BadFileError(f"{path} is not a file", hint="--input takes .npy, .npz, .json, or text with --text")
        if path.stat().st_size > INPUT_BYTES:
            raise BadFileError(f"{path} is larger than {INPUT_BYTES >> 20} MiB", hint="send it in pieces")
        if path.suffix == ".json":
            return {"": np.asarray(json.loads(path.read_text(encoding="utf-8")))}
        with path.open("rb") as file:
            zipped = file.read(2) == b"PK"
            file.seek(0)
            return _archive(file) if zipped else {"": _array(file, path.stat().st_size)}
    except FileNotFoundError:
        raise BadFileError(f"no file {path}", hint="--input takes .npy, .npz, .json, or text with --text") from None
    except RecursionError:
        raise BadFileError(f"{path} is nested too deeply", hint="numbers in lists are expected") from None
    except BadFileError:
        raise
    except Exception as problem:  # numpy, zipfile and the modules they read headers with have no common class
        raise BadFileError(f"{path}: {problem}", hint="a .npy file of numbers is expected") from problem


def _archive(file: BinaryIO) -> dict[str, Array]:
    """The arrays of an .npz. What a member claims to unpack to is limited before it's unpacked."""
    found: dict[str, Array] = {}
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > INPUT_BYTES:
            raise ValueError(f"it unpacks to {size} bytes; at most {INPUT_BYTES} are allowed")
        for entry in archive.infolist():
            with archive.open(entry) as member:
                found[entry.filename.removesuffix(".npy")] = _array(member, entry.file_size)
    return found


def _array(file: IO[bytes], size_bytes: int) -> Array:
    """One array of a file of that size. The header's claim is checked first: numpy makes room for what it says."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} of the format is not supported")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, not numbers")
    claimed, held = math.prod(shape) * dtype.itemsize, size_bytes - (file.tell() - start)
    if min(shape, default=0) < 0 or claimed > held:
        raise ValueError(f"its header claims {claimed} bytes of shape {shape}, {held} are there")
    file.seek(start)
    return np.lib.format.read_array(file, allow_pickle=False)


def fit(array: Array, dtype: str, shape: Sequence[int | str], name: str) -> Array:
    """The array with the input's dtype and a batch dimension. Raises `UsageError` if its shape can't be right."""
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{name} holds {array.dtype}, not numbers")
    if array.ndim == len(shape) - 1:
        array = array[None]
    expected = ", ".join(str(extent) for extent in shape)
    if array.ndim != len(shape):
        raise UsageError(f"{name} expects ({expected}), got {tuple(array.shape)}")
    for extent, actual in zip(shape[1:], array.shape[1:], strict=True):
        # A sequence may be shorter than the context; anything else must match.
        if isinstance(extent, int) and actual != extent and not (dtype == "int64" and actual < extent):
            raise UsageError(f"{name} expects ({expected}), got {tuple(array.shape)}")
    with np.errstate(invalid="ignore", over="ignore"):
        fitted = array.astype(dtype, copy=False)
    if np.dtype(dtype).kind in "iu" and not np.array_equal(fitted, array):
        raise UsageError(f"{name} takes whole numbers ({dtype}), got {_first_change(array, fitted)}")
    return np.ascontiguousarray(fitted)


def _first_change(array: Array, fitted: Array) -> str:
    """The first value that the other type can't hold."""
    return str(array[array != fitted].flat[0])


def save(path: Path, outputs: Mapping[str, Array]) -> None:
    """One output as .npy, several as .npz, or all as .json."""
    if path.suffix == ".json":
        path.write_text(json.dumps({name: value.tolist() for name, value in outputs.items()}) + "\n", encoding="utf-8")
    elif path.suffix == ".npy" and len(outputs) == 1:
        np.save(path, next(iter(outputs.values())), allow_pickle=False)
    elif path.suffix == ".npz":
        np.savez(path, allow_pickle=False, **dict(outputs))
    else:
        raise UsageError(f"can't write {path.name}", hint="one output as .npy, several as .npz, any as .json")


def preview(value: Array, limit: int = 8) -> str:
    """The first numbers of an array in one line."""
    flat = value.reshape(-1)
    numbers = ", ".join(f"{number:.4g}" for number in flat[:limit].tolist())
    return f"{value.dtype}{tuple(value.shape)} [{numbers}{', …' if flat.size > limit else ''}]"
