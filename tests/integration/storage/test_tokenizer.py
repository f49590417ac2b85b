"""B63: a tokenizer goes to S3 and comes back in another process with its special tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys

import pytest

from pnode.data.tokenizers import BpeTokenizer, BytesTokenizer, Tokenizer, digest_of_tokenizer
from storage import open_store
from storage.blobs import Blobs
from storage.checkpoints import DataPosition, Manifest
from tests.unit.data.conftest import TEXT
from tests.unit.data.test_tokenizers import thousand_lines

SPECIAL = ("<SEP>", "<|endoftext|>")

PROGRAM = """
import asyncio, json, sys
from pnode.data import tokenizer_from_bytes
from storage import open_store
from storage.blobs import Blobs

async def main(url, digest):
    store = open_store(url)
    tokenizer = tokenizer_from_bytes(await Blobs(store).get(digest))
    await store.close()
    ids = [tokenizer.encode(line) for line in json.load(sys.stdin)]
    print(json.dumps([ids, [tokenizer.decode_bytes(one).hex() for one in ids], tokenizer.encode("a<SEP>b")]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "tokenizer", [BpeTokenizer.train([TEXT], 400, SPECIAL), BytesTokenizer(SPECIAL)], ids=["bpe", "bytes"]
)
async def test_a_thousand_lines_after_s3_in_a_new_process(s3_url: str, tokenizer: Tokenizer) -> None:
    """Field case B63: the same ids and the same bytes, emoji, leading spaces and empty lines among them."""
    lines = thousand_lines()
    assert {"", " "} <= set(lines)
    store = open_store(s3_url)
    digest = await Blobs(store).put(tokenizer.to_bytes())
    await store.close()
    assert digest == digest_of_tokenizer(tokenizer.to_bytes()) == hashlib.sha256(tokenizer.to_bytes()).hexdigest()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", PROGRAM, s3_url, digest], input=json.dumps(lines), capture_output=True, text=True,
        env=dict(os.environ), timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ids, decoded, marked = json.loads(done.stdout)
    assert ids == [tokenizer.encode(line) for line in lines]
    assert decoded == [line.encode().hex() for line in lines]
    (separator,) = tokenizer.encode("<SEP>")
    assert marked == [*tokenizer.encode("a"), separator, *tokenizer.encode("b")]


def test_the_tokenizer_belongs_to_the_checkpoint() -> None:
    """Field case B63: two cuts that differ in the tokenizer alone have different hashes."""
    one, two = (Manifest("s", "n", "0" * 64, 1, [], data=DataPosition(tokenizer_digest=digest * 64)) for digest in "ab")
    assert one.hash != two.hash
