"""Reading a network by the name of a shipped one or from a file: the way in for everybody else.

`read_recipe` checks all of a file that can be checked before the data are known; `load` needs the size of the
vocabulary, if the file uses it, and gives the whole network.
"""

from __future__ import annotations

import gc
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from networks.assemble import Heading, assemble
from networks.diagnostics import Diagnostics, NetworkFileError, one_error, quote
from networks.document import Document, read_document, read_root, read_variables
from networks.expand import expand
from networks.expressions import VarValue
from networks.graph import Graph
from networks.limits import YAML_BYTES
from networks.model import is_id
from networks.network import BadNetworkError, Network
from networks.overrides import apply_sets
from networks.recipe import Recipe
from networks.values import BROKEN, Reader
from networks.yaml_source import SourceText, parse
from wire.errors import BadFileError

VOCAB = "vocab"
"""The variable that the tokenizer gives."""

NO_TRAINING = Recipe(batch=1, steps=0)
"""The recipe of a file without a `train` section."""

_FOLDER = Path(__file__).parent


def shipped() -> list[Path]:
    """The network files that come with DCNR, by name."""
    return sorted(_FOLDER.glob("*.yaml"))


def locate(source: str | Path) -> Path:
    """The file of a shipped network's name, or of a path. Raises `BadFileError` if there is none."""
    if isinstance(source, str) and "/" not in source and not source.endswith((".yaml", ".yml")):
        names = {path.stem: path for path in shipped()}
        if source in names:
            return names[source]
        hint = Diagnostics().suggest(source, names) if is_id(source) else ""
        raise BadFileError(f"no network is called {quote(source)}", hint=hint or f"there are {', '.join(names)}")
    path = Path(source)
    try:
        kind = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadFileError(f"can't read {quote(path)}: {reason}", hint="give a file or a shipped network") from None
    if not stat.S_ISREG(kind):
        raise BadFileError(f"{quote(path)} is not a file", hint="give the path of a .yaml file")
    return path


def load(source: str | Path, *, sets: Sequence[str] = (), vars: Mapping[str, VarValue] | None = None) -> Network:
    """The network of a file, checked as a whole: shapes, costs and recipe included.

    `vars` come from the data (`vocab`). Raises `NetworkFileError` with every error of the file, `BadFileError` if
    there is no such file.
    """
    graph, document, used = _check(source, sets, dict(vars or {}), data_known=True)
    assert graph is not None
    return Network(graph, document.recipe or NO_TRAINING, used)


def read_recipe(source: str | Path, sets: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, before its data are known, so that they can be packed first.

    All else in the file is checked too, as far as it does not depend on `vocab`. Raises as `load` does.
    """
    _, document, _ = _check(source, sets, {}, data_known=False)
    return document.recipe or NO_TRAINING


def _check(
    source: str | Path, sets: Sequence[str], given: dict[str, VarValue], *, data_known: bool
) -> tuple[Graph | None, Document, dict[str, VarValue]]:
    path = locate(source)
    with _collector_paused():
        return _check_file(path, sets, given, data_known=data_known)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Trees of many small objects, none of them garbage: Python's cycle collector would walk them in vain."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_file(
    path: Path, sets: Sequence[str], given: dict[str, VarValue], *, data_known: bool
) -> tuple[Graph | None, Document, dict[str, VarValue]]:
    diagnostics = Diagnostics()
    root = read_root(parse(_read(path), diagnostics), diagnostics)
    apply_sets(root, sets, diagnostics)
    variables = read_variables(root, given if data_known else {VOCAB: BROKEN}, diagnostics)
    reader = Reader(diagnostics, variables)
    document = read_document(root, reader)
    flat = expand(document.top, document.blocks, diagnostics)
    graph = None
    if flat is not None:
        place = {key: (scalar.text, scalar) for key, scalar in document.place.items()}
        graph = assemble(Heading(document.name, str(path)), flat, document.inputs, place, diagnostics)
    if document.recipe is not None and "loss" not in document.top.outputs and "outputs" in root.items:
        diagnostics.add(root.keys["train"], "'train' needs an output called 'loss'", "outputs: {loss: NODE}")
    diagnostics.finish()
    known = {name: value for name, value in variables.known.items() if isinstance(value, int | float | str)}
    unused = given.keys() - variables.used - _declared(root)
    return graph, document, {name: value for name, value in known.items() if name not in unused}


def _declared(root: object) -> set[str]:
    section = getattr(root, "items", {}).get("vars")
    return set(getattr(section, "items", ()))


def _read(path: Path) -> SourceText:
    try:
        with path.open("rb") as file:
            data = file.read(YAML_BYTES + 1)
    except OSError as error:
        raise BadFileError(f"can't read {quote(path)}: {error.strerror}", hint="is it a file you may read?") from None
    name = str(path)
    if len(data) > YAML_BYTES:
        raise one_error(SourceText(name, ""), 1, 1, f"the file is larger than {YAML_BYTES // 2**20} MiB", "use blocks")
    try:
        return SourceText(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        text = f"byte 0x{data[error.start]:02x} is not UTF-8"
        raise one_error(
            SourceText(name, data.decode("latin-1")), line, column, text, "save the file as UTF-8"
        ) from None


__all__ = [
    "NO_TRAINING",
    "VOCAB",
    "BadNetworkError",
    "Network",
    "NetworkFileError",
    "load",
    "locate",
    "read_recipe",
    "shipped",
]
