"""A trained network as a folder: `network.json`, `weights.safetensors`, `tokenizer.json` and a note how to load them.

`network.json` is the network's canonical form. Weights are named `<node>.<parameter>`; a tied parameter appears once,
under its owner. Optimizer state stays in the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.client import store_of
from wire.errors import DCNRError, UsageError
from wire.messages import SessionInfo

if TYPE_CHECKING:
    from torch import Tensor

    from networks.load import Network

NETWORK, WEIGHTS, TOKENIZER, README = "network.json", "weights.safetensors", "tokenizer.json", "README.md"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: str
    session: str
    step: int
    parameters: int
    size_bytes: int
    files: list[str]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def check_target(folder: Path, *, force: bool) -> None:
    """Raises `UsageError` if the folder holds anything and `force` is not set."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise UsageError(f"{folder} is not empty", hint="--to another folder, or --force to replace the files in it")


async def export_session(store_url: str, info: SessionInfo, folder: Path) -> Exported:
    """Write the last committed cut of a session. Raises `DCNRError` if nothing is saved."""
    from networks.load import Network
    from storage.blobs import Blobs
    from storage.checkpoints import load_part, read_head, read_manifest
    from storage.keys import session_prefix

    prefix = session_prefix(info.network, info.session)
    async with store_of(store_url) as store:
        head = await read_head(store, prefix)
        if head is None:
            raise DCNRError(
                f"{info.session} has saved nothing yet", hint=f"dcnr pause {info.session} saves the step it is in"
            )
        manifest = await read_manifest(store, prefix, head.manifest_key, head.manifest_digest)
        blobs = Blobs(store)
        network = Network.from_bytes(await blobs.get(manifest.network_digest))
        tokenizer = await blobs.get(info.tokenizer_digest) if info.tokenizer_digest else None
        weights: dict[str, Tensor] = {}
        for part in manifest.parts:
            state = await load_part(store, prefix, part)
            weights |= weights_of(part.vnode, state)
    about = {"session": info.session, "step": str(manifest.step), "hash": manifest.hash, "data": info.data}
    return write_folder(folder, network, weights, tokenizer, about)


def weights_of(vnode: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers of a VNode's stored state, under the names they are exported by."""
    found = {}
    for key, tensor in state.items():
        kind, _, name = key.partition(".")
        if kind in ("param", "buffer"):
            found[f"{vnode}.{name}"] = tensor
    return found


def write_folder(
    folder: Path, network: Network, weights: Mapping[str, Tensor], tokenizer: bytes | None, about: Mapping[str, str]
) -> Exported:
    """Write the files of an export. `about`: what goes into the weights' metadata and the note."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    parameters = network.parameters
    (folder / NETWORK).write_bytes(network.to_bytes())
    ordered = {name: weights[name].contiguous() for name in sorted(weights)}
    save_file(ordered, folder / WEIGHTS, metadata={"format": "pt", "network": network.id, **about})
    if tokenizer is not None:
        (folder / TOKENIZER).write_bytes(tokenizer)
    (folder / README).write_text(note(network, about, parameters, tokenizer is not None), encoding="utf-8")
    files = [name for name in (NETWORK, WEIGHTS, TOKENIZER, README) if (folder / name).exists()]
    total = sum((folder / name).stat().st_size for name in files)
    step = int(about.get("step", "0") or 0)
    return Exported(str(folder), about.get("session", ""), step, parameters, total, files)


def note(network: Network, about: Mapping[str, str], parameters: int, text: bool) -> str:
    """The README of an export."""
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items() if value)
    inputs = "\n".join(f"- `{name}`: {spec}" for name, spec in network.graph.inputs.items())
    outputs = "\n".join(f"- `{name}`: {port}" for name, port in network.graph.outputs.items())
    tokenizer = f"- `{TOKENIZER}`: how text becomes token ids and back\n" if text else ""
    return f"""# {network.id}

{parameters:,} parameters, trained with DCNR.

{facts}

## Files

- `{NETWORK}`: the graph and the recipe, with all vars filled in
- `{WEIGHTS}`: the parameters, named `<node>.<parameter>`; a tied one is stored once, under its owner
{tokenizer}
## Inputs and outputs

{inputs}

{outputs}

## Load the weights

```python
from safetensors.torch import load_file

weights = load_file("{WEIGHTS}")  # no code runs, nothing is unpickled
print({{name: tuple(tensor.shape) for name, tensor in weights.items()}})
```

Run the whole network with DCNR: `dcnr net show {NETWORK}`, `dcnr train {NETWORK} --local`.
"""
