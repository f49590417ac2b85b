"""All readers of foreign bytes that need no running process. `tests.fuzz.live` has the one that does."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import msgspec
import numpy as np

from tests.fuzz import samples
from tests.fuzz.mutate import MARKED, NUMBERS, change_bytes, change_text, json_of, msgpack_of, structured
from tests.fuzz.mutate import tree_of_msgpack as unpack
from tests.fuzz.target import Target
from wire.codec import read_body, read_header, read_message, seal_header, tensor_problem
from wire.endpoint import Endpoint, Source
from wire.errors import RemoteError
from wire.messages import Deployment, Part, PeerRef, TensorMeta, VNodeReport
from wire.packets import Data

WORK = tempfile.TemporaryDirectory(prefix="dcnr-fuzz-")
"""Where targets that read files put them."""

IDS = ["p1", "p2", "run", 3, 6, "hop", "tok"]
DTYPES = ["float32", "int64", "bool", "float16", "complex64"]


def _file(name: str, data: bytes) -> Path:
    path = Path(WORK.name, name)
    path.write_bytes(data)
    return path


# ---------------------------------------------------------------- the wire


def _header(data: bytes) -> None:
    packet = read_header(seal_header(data))
    if isinstance(packet, Data):
        message = read_message(packet.message)
        tensor_problem(message, [size for size, _ in packet.frames])


def _headers() -> list[bytes]:
    return [msgpack.packb(fields) for fields in samples.packet_fields()]


HEADER = Target(
    "header", "a packet's header and the message in it", _headers, _header, structured(unpack, msgpack_of, items=IDS)
)


def _tensor(data: bytes) -> None:
    """`[message, sizes of the frames]`; what fits is made into tensors of zeros."""
    from pnode.tensors import Received
    from pnode.tensors import unpack as make

    try:
        fields, sizes = msgspec.msgpack.decode(data, type=tuple[list[Any], list[int]])
    except msgspec.MsgspecError as error:
        raise RemoteError(str(error)) from None
    message = read_message(fields)
    problem = tensor_problem(message, sizes)
    if problem:
        raise RemoteError(problem)
    tensors: list[TensorMeta] = getattr(message, "tensors", [])
    if sum(sizes) <= 1 << 20 and len(sizes) == len(tensors):
        codec = tensors[0].codec if tensors else ""
        make(Received(tensors, [memoryview(bytes(size)) for size in sizes]), codec=codec)


def _tensors() -> list[bytes]:
    found: list[bytes] = []
    plain = ((["float32", [2, 3]], 24), (["int64", []], 8), (["bool", [0, 5]], 0), (["bfloat16", [1, 2, 3, 4]], 48))
    coded = ((["float32", [2, 3], "int8"], 14),)
    for fields in samples.message_fields():
        if isinstance(fields[-1], list) and fields[0] in ("hop", "tie_gradient", "tie_version", "infer_hop"):
            for described in (plain[:1], plain[:2], plain, coded):
                fields[-1] = [meta for meta, _ in described]
                found.append(msgpack.packb([fields, [size for _, size in described]]))
    return found


def _change_tensor(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """As any tree; in half of the cases the sizes are those that the shapes say, so that the next check is reached."""
    if random.random() < 0.2:
        return change_bytes(random, data, others)
    (fields, sizes) = unpack(data)
    metas = fields[-1]
    for _ in range(1 + int(random.random() * 3)):
        meta = metas[int(random.random() * len(metas))]
        if random.random() < 0.2:
            meta[0] = DTYPES[int(random.random() * len(DTYPES))]
        else:
            meta[1].insert(int(random.random() * (len(meta[1]) + 1)), NUMBERS[int(random.random() * len(NUMBERS))])
            if random.random() < 0.3:
                meta[1].append(0)
    if random.random() < 0.7:
        width = {"float32": 4, "int64": 8, "bool": 1, "float16": 2, "bfloat16": 2}
        sizes = [width.get(dtype, 8) * functools.reduce(lambda a, b: a * b, shape, 1) for dtype, shape, *_ in metas]
    try:
        return msgpack.packb([fields, sizes])
    except OverflowError:
        return msgpack.packb([fields, [0] * len(metas)])


TENSOR = Target("tensor", "what a message says of its tensors, and the tensors", _tensors, _tensor, _change_tensor)

ME = PeerRef("run", 3, ["tcp://127.0.0.1:7700"])


def _link(data: bytes) -> None:
    """`[[header fields, [frame, …]], …]` to one endpoint. It refuses without raising, and goes on to serve others."""
    try:
        packets = msgspec.msgpack.decode(data, type=list[tuple[list[Any], list[bytes]]])
    except msgspec.MsgspecError as error:
        raise RemoteError(str(error)) from None
    endpoint, now, out = Endpoint(ME), 0.0, []
    for fields, frames in packets[:64]:
        with contextlib.suppress(ValueError, OverflowError):
            header = seal_header(msgpack.packb(fields))
            endpoint.on_frames(Source("a", 5, 2), header, [memoryview(frame) for frame in frames], now, out)
        now += 0.3
        endpoint.flush(now, out)
        endpoint.on_tick(now, out)
    endpoint.snapshot()
    hello = seal_header(msgpack.packb([2, 0, "b", 9, "run", 3, ["b", 9, ["tcp://b:1"]], 1, [0, 0, 0]]))
    answers: list[Any] = []
    endpoint.on_frames(Source("b", 9, 0), hello, [], now, answers)
    endpoint.flush(now, answers)
    assert any(getattr(answer, "kind", None) == 1 for answer in answers), "it no longer welcomes others"


def _conversation() -> list[list[Any]]:
    from wire.codec import digest_of

    head = ["a", 5, "run", 3]
    hello = [2, 0, *head, ["a", 5, ["tcp://a:1"]], 1, [0, 0, 0]]
    body = b"x" * 24
    hop = ["hop", "run", 1, 0, 0, 0, 0, 0, 0, "a", 0, [["float32", [2, 3]]]]
    talk: list[list[Any]] = [[hello, []]]
    for seq, message in enumerate((hop, ["ok", "r"], ["inspect_run", "q", "run", 1])):
        frames = [body] if message is hop else []
        described = [[len(frame), digest_of(frame)] for frame in frames]
        talk.append([[2, 6, *head, 1, 1, [0, 0, 0], 2, seq, described, 0, message], frames])
    talk.append([[2, 6, *head, 1, 1, [0, 0, 0], 1, 0, [[24, 0]], 2, hop], []])
    for index, piece in enumerate((body[:10], body[10:])):
        chunk = [2, 7, *head, 1, 1, [0, 0, 0], 1, 1 + index, 0, 10 * index, len(piece), digest_of(piece)]
        talk.append([chunk, [piece]])
    talk.append([[2, 4, *head, 1, 1, [0, 0, 0], 0, 0, [[3, 4]], [7]], []])
    talk.append([[2, 5, *head, 1, 1, [0, 0, 0], 2, 1], []])
    talk.append([[2, 2, *head, "bye"], []])
    return talk


def _links() -> list[bytes]:
    talk = _conversation()
    return [msgpack.packb(talk[:count]) for count in range(2, len(talk) + 1)]


LINK = Target(
    "link", "packets in a row to an endpoint", _links, _link,
    structured(unpack, msgpack_of, items=[*IDS, (1 << 64) - 1, (1 << 64) - 2], plain=0.1),
)  # fmt: skip


BODIES: tuple[Any, ...] = (Deployment, list[Part], list[VNodeReport], tuple[tuple[int, float], ...])


def _body(data: bytes) -> None:
    kind = (
        (Deployment, list[Part], list[VNodeReport], tuple[tuple[int, float], ...])[data[0] % 4] if data else Deployment
    )
    read_body(data[1:], kind)


def _bodies() -> list[bytes]:
    return [bytes([at]) + msgspec.msgpack.encode(samples.sample(kind)) for at, kind in enumerate(BODIES)]


def _change_body(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    change = structured(unpack, msgpack_of, items=IDS)
    return data[:1] + change(random, data[1:], [other[1:] for other in others])


BODY = Target("body", "what travels as a frame: deployments, parts, reports, norms", _bodies, _body, _change_body)


# ---------------------------------------------------------------- network files

WORDS = [
    b"$d", b"$(4*d)", b"$(1/0)", b"$(9**9**9)", b"&a", b"*a", b"!!python/object:os.system", b"- id: x", b"{", b"}",
    b"[",
    b"]", b"\t", b"nan", b".inf", b"-1", b"0", b"99999999999", b"1e999", b"relu", b"linear", b"block", b"repeat: 99999",
    b"loss", b"x -> x", b"->", b"...", b"---", b"%YAML 1.2", b"\x00", b"\xff", "\u202e".encode(), b"<<: *a", b"|", b">",
    b"'", b'"', b"? a", b"__import__('os')", b"batch: 100000000", b"0x7fffffffffffffff", b"tie: tok", b"id: ../../x",
    MARKED.encode().replace(b"\n", b" "), b"1.5", b"true", b"null", b"~",
]  # fmt: skip


def _yaml(data: bytes) -> None:
    from networks.load import load

    load(_file("network.yaml", data), vars={"vocab": 65})


SMALL = b"""version: 1
name: small
vars: {d: 8, n: 2}
inputs:
  x: {dtype: float32, shape: [batch, $d]}
  y: {dtype: int64, shape: [batch]}
blocks:
  pair:
    inputs: [x]
    nodes:
      - {id: up, type: linear, in: $d, out: $(2*d), bias: false}
      - {id: act, type: relu}
      - {id: down, type: linear, in: $(2*d), out: $d}
      - {id: sum, type: add}
    edges:
      - x -> up -> act -> down -> sum
      - x -> sum
    output: sum
nodes:
  - {id: b, type: block, block: pair, repeat: $n}
  - {id: head, type: linear, in: $d, out: 4}
  - {id: loss, type: cross_entropy}
edges:
  - x -> b -> head -> loss.logits
  - y -> loss.targets
outputs: {logits: head, loss: loss}
train:
  data: {dataset: digits}
  batch: 4
  steps: 10
  optimizer: {type: sgd, lr: 0.1}
"""


def _yamls() -> list[bytes]:
    from networks.load import shipped

    small = [SMALL, SMALL, SMALL.replace(b"repeat: $n", b"repeat: 3"), SMALL[: SMALL.index(b"train:")]]
    return small * 5 + [path.read_bytes() for path in shipped()]


def _change_yaml(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return change_text(random, data, WORDS) if random.random() < 0.8 else change_bytes(random, data, others)


YAML = Target("yaml", "network files", _yamls, _yaml, _change_yaml)


def _network(data: bytes) -> None:
    from cli.card import Card
    from networks.network import Network

    with contextlib.suppress(RemoteError):
        Card.of(data)
    Network.from_bytes(data)


def _networks() -> list[bytes]:
    from networks.load import load

    small = load(_file("small.yaml", SMALL)).to_bytes()
    return [small, small, small, load("mlp-digits").to_bytes(), load("moe-digits").to_bytes()]


JSON = structured(json.loads, json_of, items=IDS)

NETWORK = Target("network", "a network's canonical bytes", _networks, _network, JSON)


# ---------------------------------------------------------------- the store


class _OneObject:
    """A store that has one object, whatever the key, and believes in its digest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def get(self, key: str, *, sha256: str | None = None, max_bytes: int = 0) -> Any:
        from storage.store import Stored, too_large

        if max_bytes and len(self._data) > max_bytes:
            raise too_large(key, "here", len(self._data), max_bytes)
        return Stored(self._data, "etag")


PREFIX = "networks/n/sessions/s/"


def _at_once(work: Any) -> Any:
    """The result of a coroutine that never has to wait."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


def _manifest(data: bytes) -> None:
    """As recovery reads it: the manifest, its hash, and the keys of its parts."""
    from storage.checkpoints import Manifest, decode_manifest
    from storage.keys import part_key

    manifest: Manifest = decode_manifest(data, key="manifest")
    assert len(manifest.hash) == 64
    for part in manifest.parts:
        part_key(PREFIX, part.digest)


def _manifests() -> list[bytes]:
    from storage.checkpoints import Manifest

    parts = [Part(f"h.{number}", f"{number:064x}", 100) for number in range(3)]
    first = Manifest("s", "n", "0" * 64, 10, parts, counters={"tokens": 5}, environment=["torch"])
    return [first.to_bytes(), Manifest("s", "n", "0" * 64, 0, []).to_bytes()]


MANIFEST = Target("manifest", "a checkpoint's manifest", _manifests, _manifest, JSON)


def _record(data: bytes) -> None:
    """Sealed records: the head of a session, the term, what a PNode remembers."""
    from pnode.remembered import Remembered
    from storage.checkpoints import HeadBody
    from storage.sealed import unseal
    from storage.store import CorruptError
    from storage.terms import TermRecord

    for kind in (HeadBody, TermRecord, Remembered):
        try:
            unseal(data, kind, key="record")
            return
        except CorruptError as error:
            last = error
    raise last


def _records() -> list[bytes]:
    from pnode.remembered import Remembered
    from storage.checkpoints import HeadBody
    from storage.sealed import seal
    from storage.terms import TermRecord

    return [seal(samples.sample(kind)) for kind in (HeadBody, TermRecord, Remembered)]


def _change_record(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Half of the changed bodies are sealed again, as whoever changes them on purpose would."""
    from storage.sealed import seal

    if random.random() < 0.4:
        return JSON(random, data, others)
    from tests.fuzz.mutate import change_tree

    body = change_tree(random, json.loads(data)["body"], IDS)
    try:
        return seal(body)
    except (TypeError, ValueError, OverflowError):
        return seal({"cluster": MARKED})


RECORD = Target("record", "sealed records", _records, _record, _change_record)


def _safetensors(data: bytes) -> None:
    from storage.tensors import decode_tensors

    decode_tensors(data, key="part")


def _parts() -> list[bytes]:
    import torch

    from storage.tensors import encode_tensors

    state = {
        "param.w": torch.ones(3, 4),
        "param.b": torch.zeros(4, dtype=torch.bfloat16),
        "optim.step": torch.tensor(3),
    }
    empty = {"param.e": torch.zeros(0, 7)}
    return [encode_tensors(state), encode_tensors(empty), encode_tensors({}), encode_tensors({**state, **empty})]


def _change_part(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The header as a tree, with its length put right in most cases."""
    if random.random() < 0.25:
        return change_bytes(random, data, others)
    length = int.from_bytes(data[:8], "little")
    header = JSON(random, data[8 : 8 + length], [other[8:] for other in others])
    wrong = NUMBERS[int(random.random() * len(NUMBERS))] & ((1 << 64) - 1)
    told = wrong if random.random() < 0.1 else len(header)
    return told.to_bytes(8, "little") + header + data[8 + length :]


SAFETENSORS = Target("safetensors", "a checkpoint's part", _parts, _safetensors, _change_part)


# ---------------------------------------------------------------- data and tokenizers


def _tokenizer(data: bytes) -> None:
    """Read, and used as in generation."""
    from pnode.data.tokenizers import tokenizer_from_bytes

    tokenizer = tokenizer_from_bytes(data)
    tokenizer.decode(range(min(tokenizer.vocab, 300)))
    tokenizer.encode("abc <s> 0\n")
    tokenizer.to_bytes()


def _tokenizers() -> list[bytes]:
    from pnode.data.tokenizers import BpeTokenizer, BytesTokenizer, CharTokenizer

    text = "abc abc abd 0123 \n <s>"
    return [
        CharTokenizer.of(text, ["<s>"]).to_bytes(),
        BytesTokenizer(["<s>", "<pad>"]).to_bytes(),
        BpeTokenizer.train([text] * 3, 270, ["<s>"]).to_bytes(),
    ]


TOKENIZER = Target("tokenizer", "stored tokenizers", _tokenizers, _tokenizer, JSON)


def _packed(data: bytes) -> None:
    from pnode.data.packed import open_packed

    packed = open_packed(data)
    for array in packed.arrays.values():
        array[:3].tolist()


def _packeds() -> list[bytes]:
    from pnode.data.packed import encode_packed

    tokens = {"train.tokens": np.arange(20, dtype=np.uint16), "val.tokens": np.arange(5, dtype=np.uint16)}
    samples_: dict[str, Any] = {}
    for split, rows in (("train", 4), ("val", 2)):
        samples_[f"{split}.features"] = np.ones((rows, 3), np.float32)
        samples_[f"{split}.targets"] = np.zeros(rows, np.int64)
        samples_[f"{split}.ids"] = np.arange(rows, dtype=np.int64)
    return [b"".join(encode_packed("tokens", 20, tokens)), b"".join(encode_packed("samples", 10, samples_))]


def _change_packed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    if random.random() < 0.3:
        return change_bytes(random, data, others)
    length = int.from_bytes(data[8:16], "little")
    header = JSON(random, data[16 : 16 + length], [])
    start = 16 + length + (-(16 + length) % 64)
    return data[:8] + len(header).to_bytes(8, "little") + header + bytes(-(16 + len(header)) % 64) + data[start:]


PACKED = Target("packed", "packed data sets", _packeds, _packed, _change_packed)


def _corpus(data: bytes) -> None:
    from pnode.data.corpus import read_corpus

    read_corpus(str(_file("corpus.jsonl", data)), limit_bytes=None)


def _corpora() -> list[bytes]:
    return [b'{"text": "abc"}\n{"text": "d\\u00e9f", "more": [1, 2]}\n\n{"text": ""}\n']


def _change_corpus(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    at = int(random.random() * len(lines))
    lines[at] = JSON(random, lines[at], []) if lines[at] else change_bytes(random, lines[at])
    return b"\n".join(lines) if random.random() < 0.7 else change_bytes(random, data, others)


CORPUS = Target("corpus", "lines of JSON to train on", _corpora, _corpus, _change_corpus)


# ---------------------------------------------------------------- files of the command line


def _config(data: bytes) -> None:
    """The files of a home folder; whatever they hold, a command ends with one clear line."""
    from cli.cluster import Cluster
    from cli.context import Contexts, orchestrator_address

    home = Path(WORK.name)
    _file("contexts.json", data)
    contexts = Contexts.read(home)
    if contexts.current:
        orchestrator_address(None, home)
        contexts.without(contexts.current)
    _file("cluster.json", data)
    cluster = None if contexts.addresses else Cluster.read(home)
    if cluster is not None:
        cluster.alive()


def _configs() -> list[bytes]:
    process = {"name": "orchestrator", "pid": 99999999, "birth": "x:1", "log": "/nowhere"}
    cluster = {
        "store": "file:///nowhere", "address": "tcp://127.0.0.1:1", "threads": 1, "device": "cpu", "lease_s": 10.0,
        "orchestrator": process, "pnodes": [process], "contexts": {}, "current": "",
    }  # fmt: skip
    contexts = {"current": "home", "contexts": {"home": "tcp://h:1", "work": "tcp://[::1]:7700"}}
    return [json.dumps(cluster).encode(), json.dumps(contexts).encode()]


CONFIG = Target("config", "contexts and the local cluster's file", _configs, _config, JSON)


def _input(data: bytes) -> None:
    """What `dcnr infer --input` takes: .npy, .npz and .json, by their beginning."""
    from cli.inputs import fit, read_file

    suffix = ".json" if data[:1] in b'[{-0123456789"' else ".npy"
    for array in read_file(_file("input" + suffix, data)).values():
        fit(array, "float32", ["batch", 3], "x")


def _inputs() -> list[bytes]:
    one, many = io.BytesIO(), io.BytesIO()
    np.save(one, np.ones((2, 3), np.float32))
    np.savez(many, x=np.ones((2, 3), np.float32), y=np.zeros((1, 3), np.float32))
    return [one.getvalue(), many.getvalue(), b"[[1, 2, 3], [4, 5, 6.5]]"]


def _change_input(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    if data[:1] == b"[" and random.random() < 0.7:
        return JSON(random, data, others)
    if random.random() < 0.3:
        return change_text(
            random, data, [b"(99999999999, 3)", b"'|O'", b"'descr':", b"(-1,)", b"}", b"(" * 300, b"'<f8'"]
        )
    return change_bytes(random, data, others)


INPUT = Target("input", "arrays given to dcnr infer", _inputs, _input, _change_input)

TARGETS = {
    target.name: target
    for target in (
        HEADER, TENSOR, LINK, BODY, YAML, NETWORK, MANIFEST, RECORD, SAFETENSORS, TOKENIZER, PACKED, CORPUS, CONFIG,
        INPUT,
    )
}  # fmt: skip
