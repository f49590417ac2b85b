"""What the remote store decides: windows, pieces, quotas, what leaves a cache, what is not written. No socket."""

from __future__ import annotations

import os
import random

import pytest

from storage.remote.cache import Kept, superfluous
from storage.remote.pieces import Ask, Download, PieceError, Upload
from storage.remote.policy import write_problem
from storage.remote.quota import SHARED, Ledger, network_of, parse_quotas, prefix_of
from storage.remote.window import Window
from wire.errors import UsageError

SEED = int(os.environ.get("DCNR_SEED", "1"))
CHUNK = 128 << 10


def settled(rate: float, round_trip_s: float, chunks: int = 400) -> int:
    """The window after some chunks over a line that takes one after another, with so much delay."""
    window, now, free = Window(CHUNK), 0.0, 0.0
    flying: list[tuple[float, object]] = []
    for _ in range(chunks):
        while len(flying) * CHUNK + CHUNK <= max(window.size_bytes, CHUNK):
            free = max(free, now) + CHUNK / rate
            flying.append((free + round_trip_s, window.sent(now)))
        now, sent = flying.pop(0)
        window.arrived(sent, CHUNK, now)  # type: ignore[arg-type]
    return window.size_bytes


def test_the_window_grows_to_what_the_line_holds() -> None:
    for rate, round_trip_s in ((6.25e6, 0.08), (1.25e6, 0.2), (12.5e6, 0.01)):
        held = rate * round_trip_s
        size = settled(rate, round_trip_s)
        assert held <= size <= 2 * (held + 2 * CHUNK), (rate, round_trip_s, size / held)
    assert settled(1e5, 0.001) <= 2 * CHUNK + 1000, "a slow line gets the least"
    assert settled(1e9, 0.5, 3000) == 8 << 20, "and none more than the most"


def test_pieces_come_in_any_order_and_are_handed_on_in_theirs() -> None:
    print("seed", SEED)
    for seed in range(SEED, SEED + 200):
        draw = random.Random(seed)
        data = draw.randbytes(draw.randrange(1, 3000))
        start = draw.randrange(len(data) + 1)
        download, window = Download(len(data), 100, start), draw.choice([1, 100, 250, 1000])
        flying: list[Ask] = []
        got = bytearray()
        while not download.done:
            flying += download.asks(window)
            assert flying, "something is always under way"
            taken = max(ask.offset + ask.size_bytes for ask in flying) - download.position
            assert taken <= max(window, 100), "what is under way and what waits stay within the window"
            ask = flying.pop(draw.randrange(len(flying)))
            for piece in download.arrived(ask, data[ask.offset : ask.offset + ask.size_bytes]):
                got += piece
        assert bytes(got) == data[start:]
        assert download.asks(1000) == flying == []


def test_a_piece_that_does_not_fit_is_refused() -> None:
    download = Download(250, 100)
    first, second = download.asks(200)
    with pytest.raises(PieceError, match="99 bytes came from 0 on"):
        download.arrived(first, bytes(99))
    with pytest.raises(PieceError, match="without having been asked for"):
        download.arrived(Ask(200, 50), bytes(50))
    assert download.arrived(second, bytes(100)) == []
    assert len(download.arrived(first, bytes(100))) == 2
    with pytest.raises(PieceError):
        download.arrived(first, bytes(100))
    with pytest.raises(PieceError, match="no byte 11"):
        Download(10, 100, 11)


class Taker:
    """The other side of an upload: takes pieces in order, and loses what it has now and then."""

    def __init__(self) -> None:
        self.data = bytearray()

    def append(self, offset: int, piece: bytes) -> int:
        if offset <= len(self.data) < offset + len(piece):
            self.data += piece[len(self.data) - offset :]
        return len(self.data)


def test_an_upload_arrives_whole_whatever_is_lost() -> None:
    """Pieces that arrive late or twice, answers in any order, and a taker that forgets."""
    print("seed", SEED)
    for seed in range(SEED, SEED + 300):
        draw = random.Random(seed)
        data = draw.randbytes(draw.randrange(1, 3000))
        taker = Taker()
        taker.data += data[: draw.randrange(len(data) + 1)]
        upload = Upload(len(data), 100, len(taker.data))
        flying: list[tuple[Ask, int]] = []
        for turn in range(5000):
            if upload.done:
                break
            for ask in upload.asks(draw.choice([100, 350])):
                flying.append((ask, taker.append(ask.offset, data[ask.offset : ask.offset + ask.size_bytes])))
            if turn < 300 and draw.random() < 0.1:
                del taker.data[draw.randrange(len(taker.data) + 1) :]
            if flying:
                upload.answered(*flying.pop(draw.randrange(len(flying))))
            if draw.random() < 0.05:
                flying.clear()
                upload.begin(len(taker.data))
        assert upload.done, seed
        if turn >= 300 or bytes(taker.data) == data:
            assert bytes(taker.data) == data[: len(taker.data)]


def test_an_upload_begins_again_where_the_other_side_is() -> None:
    upload = Upload(500, 100)
    asks = upload.asks(300)
    assert [ask.offset for ask in asks] == [0, 100, 200]
    upload.answered(asks[0], 100)
    upload.answered(asks[1], 50)
    assert upload.asks(300) == [], "first all that is under way comes back"
    upload.answered(asks[2], 50)
    assert [ask.offset for ask in upload.asks(300)] == [50, 150, 250]
    for bad in (-1, 501):
        with pytest.raises(PieceError):
            upload.begin(bad)
    with pytest.raises(PieceError):
        upload.answered(Ask(7, 3), 0)


def test_an_earlier_tries_pieces_that_come_late_are_not_sent_again() -> None:
    upload = Upload(1000, 100)
    ask = upload.asks(100)[0]
    upload.answered(ask, 700)
    assert [each.offset for each in upload.asks(100)] == [700]


def test_quotas_count_what_is_stored_and_what_is_on_its_way() -> None:
    ledger = Ledger({"*": 100, "big": 1000})
    assert (ledger.quota("a"), ledger.quota("big"), ledger.quota(SHARED)) == (100, 1000, None)
    assert ledger.unknown("a")
    assert not ledger.unknown(SHARED)
    ledger.counted("a", 40)
    assert ledger.problem("a", 60) == ""
    assert "may store 100 bytes: 40 are stored, 61 more" in ledger.problem("a", 61)
    ledger.reserve("t", "a", 50)
    assert "50 are on their way" in ledger.problem("a", 11)
    assert ledger.problem("a", 60, "t") == "", "a transfer takes the place of its own reservation"
    assert ledger.problem("b", 100) == ""
    ledger.written("a", 50)
    ledger.release("t")
    assert ledger.problem("a", 11) != ""
    assert ledger.problem("a", 10) == ""
    assert Ledger({}).problem("a", 1 << 60) == ""


@pytest.mark.parametrize(
    ("key", "network"),
    [
        ("networks/gpt/sessions/s/parts/x", "gpt"), ("networks/gpt/x", "gpt"), ("networks/gpt", SHARED),
        ("blobs/sha256/ab/x", SHARED), ("registry/networks/gpt", SHARED), ("networks/x.y/z", SHARED),
    ],
)  # fmt: skip
def test_which_network_a_key_belongs_to(key: str, network: str) -> None:
    assert network_of(key) == network
    assert network == SHARED or key.startswith(prefix_of(network))


def test_quotas_are_read() -> None:
    assert parse_quotas(["10g", "gpt=2m", "shared=7"]) == {"*": 10 << 30, "gpt": 2 << 20, SHARED: 7}
    for bad in ("", "g", "10x", "-1g", "=5g", "UP=5g", "a=b", "1.5g", "a=1g=2g"):
        with pytest.raises(UsageError):
            parse_quotas([bad])


def test_what_goes_from_a_full_cache() -> None:
    kept = [Kept("old", 50, 1.0), Kept("older", 30, 0.5), Kept("new", 60, 3.0), Kept("newer", 10, 4.0)]
    assert superfluous(kept, 150) == []
    assert superfluous(kept, 149) == ["older"]
    assert superfluous(kept, 100) == ["older", "old"]
    assert superfluous(kept, 0) == ["older", "old", "new", "newer"]


@pytest.mark.parametrize("key", ["registry/term.json", "networks/n/sessions/s/head.json",
                                 "networks/n/sessions/s/manifests/1-a.json"])  # fmt: skip
def test_the_truth_is_not_written(key: str) -> None:
    assert "orchestrator alone" in write_problem(key, truth=False)
    assert write_problem(key, truth=True) == ""


@pytest.mark.parametrize("key", ["blobs/sha256/ab/x", "networks/n/sessions/s/parts/a.safetensors",
                                 "networks/n/sessions/s/trace/1/a.safetensors", "probe-1", "registry2/x"])  # fmt: skip
def test_what_pnodes_make_is_written(key: str) -> None:
    assert write_problem(key, truth=False) == ""
