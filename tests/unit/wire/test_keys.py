"""Key files, secrets, tokens, the allow-list and roles."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import stat
import traceback

import msgspec
import pytest
import zmq

from wire.admission import LOG_EVERY_S, LOG_LINES, LOGGED_KEYS, Admission, ListError, RefusalLog
from wire.errors import MisuseError, UsageError
from wire.keys import KEY_FILE, KeyFileError, KeyPair, Secret, checked_key, fingerprint, is_key, load, load_or_make
from wire.messages import Admitted, all_messages
from wire.roles import CLIENT, JOIN, MAY_SEND, ORCHESTRATOR, PNODE, ROLES, STORAGE, may_send
from wire.tokens import MAX_CHARS, Token, read_token

A, B, C = KeyPair.new(), KeyPair.new(), KeyPair.new()


# ---------------------------------------------------------------- files


def test_a_pair_is_made_once_for_its_owner_alone(tmp_path):
    assert load(tmp_path) is None
    made = load_or_make(tmp_path)
    assert load_or_make(tmp_path) == made == load(tmp_path)
    file = tmp_path / KEY_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert zmq.curve_public(made.secret.reveal().encode()).decode() == made.public
    assert [entry.name for entry in file.parent.iterdir()] == ["curve.key"]


def test_an_open_umask_makes_no_open_file(tmp_path):
    before = os.umask(0)
    try:
        load_or_make(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o601])
def test_a_file_open_to_others_is_refused_with_the_command_that_mends_it(tmp_path, mode):
    load_or_make(tmp_path)
    file = tmp_path / KEY_FILE
    file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"chmod 600 {file}"):
        load_or_make(tmp_path)
    file.chmod(0o600)
    file.parent.chmod(0o750)
    with pytest.raises(KeyFileError, match=f"chmod 700 {file.parent}"):
        load(tmp_path)


def test_another_owners_file_is_refused(tmp_path, monkeypatch):
    load_or_make(tmp_path)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(KeyFileError, match=rf"belongs to user {os.getuid()}.*chown"):
        load(tmp_path)


def test_a_link_in_place_of_the_file_is_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    load_or_make(elsewhere)
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / KEY_FILE).symlink_to(elsewhere / KEY_FILE)
    with pytest.raises(KeyFileError, match="can't read"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"public": 1, "secret": 2}', '{"public": "x", "secret": "y"}', "\xff", "x" * 9999]
)
def test_a_damaged_file_is_refused_not_replaced(tmp_path, text):
    load_or_make(tmp_path)
    (tmp_path / KEY_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(KeyFileError, match="does not hold a key pair"):
        load_or_make(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == text.encode("latin-1")


def test_halves_of_two_pairs_are_refused(tmp_path):
    load_or_make(tmp_path)
    (tmp_path / KEY_FILE).write_text(json.dumps({"public": A.public, "secret": B.secret.reveal()}))
    with pytest.raises(KeyFileError):
        load(tmp_path)


# ---------------------------------------------------------------- secrets


def test_a_secret_shows_itself_nowhere(caplog):
    secret = A.secret.reveal()
    caplog.set_level(logging.DEBUG)
    logging.getLogger().warning("%s %r %s", A.secret, A, [A])
    seen = [repr(A.secret), str(A.secret), f"{A.secret}", repr(A), repr([A]), caplog.text]
    for broken in (lambda: pickle.dumps(A), lambda: msgspec.msgpack.encode(A), lambda: msgspec.json.encode(A.secret)):
        try:
            broken()
        except Exception:
            seen.append(traceback.format_exc())
        else:
            raise AssertionError("a secret was encoded")
    token = Token(("tcp://10.0.0.1:7700",), "orchestrator", B.public, A, 0, PNODE)
    seen.append(repr(token))
    assert not [text for text in seen if secret in text or secret[:8] in text]
    assert secret in json.dumps(A.secret.reveal())


def test_errors_about_keys_do_not_repeat_them():
    with pytest.raises(MisuseError) as caught:
        Secret(A.secret.reveal()[:-1])
    assert A.secret.reveal()[:8] not in str(caught.value)
    assert "39" in str(caught.value)
    assert checked_key(A.public) == A.public
    for bad in ("", A.public[:-1], A.public + "a", A.public[:-1] + "~", A.public[:-1] + "\n", "é" * 40):
        assert not is_key(bad)


def test_a_fingerprint_is_of_the_32_bytes():
    secret = "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"  # the pair of RFC 26's examples
    public = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
    assert KeyPair.of_secret(secret).public == public
    raw = bytes.fromhex("BB88471D65E2659B30C55A5321CEBB5AAB2B70A398645C26DCA2B2FCB43FC518")
    expected = hashlib.sha256(raw).hexdigest()
    assert fingerprint(public).replace("-", "") == expected[:16]
    assert [len(group) for group in fingerprint(public).split("-")] == [4, 4, 4, 4]


# ---------------------------------------------------------------- tokens


def token(**changes) -> Token:
    fields = {
        "addresses": ("tcp://10.0.0.1:7700", "tcp://[fe80::1]:7700"), "orchestrator": "orchestrator",
        "server_key": B.public, "pair": A, "until": 1e9, "role": PNODE,
    }  # fmt: skip
    return Token(**{**fields, **changes})


def test_a_token_comes_back_as_it_was():
    text = token().text()
    assert read_token(text) == token()
    assert read_token(f"  {text[:40]}\n{text[40:]}\r\n") == token()
    assert text.startswith("dcnr1:")
    assert " " not in text
    assert "'" not in text
    assert "$" not in text


@pytest.mark.parametrize(
    "change", [{"addresses": ()}, {"addresses": ("tcp://a:1",) * 9}, {"addresses": ("http://a:1",)}, {"role": "join"},
               {"role": "orchestrator"}, {"orchestrator": "../x"}, {"server_key": "x"}, {"until": -1.0},
               {"until": float("nan")}, {"until": float("inf")}],
)  # fmt: skip
def test_a_token_that_says_too_much_is_refused(change):
    with pytest.raises(UsageError) as caught:
        read_token(token(**change).text())
    assert A.secret.reveal() not in str(caught.value)


def test_a_damaged_token_is_refused_without_being_repeated():
    text = token().text()
    bad = ["", "x", "dcnr1:", "dcnr2:" + text[6:], text[:-1], text[:-9], text + "AAAA", text[:50] + "é" + text[51:],
           "dcnr1:" + "A" * MAX_CHARS, text[:-4] + "!!!!"]  # fmt: skip
    for broken in bad:
        with pytest.raises(UsageError) as caught:
            read_token(broken)
        assert text[20:40] not in str(caught.value)


# ---------------------------------------------------------------- the allow-list


def entry(pair: KeyPair, name: str, role: str = PNODE, **more) -> Admitted:
    return Admitted(pair.public, name, role, **more)


def test_only_who_is_listed_now_is_found():
    admission = Admission([entry(A, "a"), entry(B, "b", until=100.0)])
    assert admission.find(A.public, 1e12) == entry(A, "a")
    assert admission.find(B.public, 99.9) is not None
    assert admission.find(B.public, 100.0) is None
    assert admission.find(C.public, 0) is None
    assert admission.find("", 0) is None
    assert admission.refusal(A.public, "a", 0) == ""
    assert "belongs to a" in admission.refusal(A.public, "b", 0)
    assert "ended" in admission.refusal(B.public, "b", 100)
    assert "not admitted" in admission.refusal(C.public, "c", 0)


def test_only_a_newer_list_counts_and_what_is_pinned_stays():
    admission, changes = Admission(), []
    admission.watch(lambda: changes.append(admission.version))
    admission.pin(entry(A, "orchestrator", ORCHESTRATOR))
    assert admission.replace(3, [entry(B, "b")])
    assert not admission.replace(3, [])
    assert not admission.replace(2, [])
    assert admission.find(B.public, 0)
    assert admission.find(A.public, 0)
    assert admission.replace(4, [entry(C, "orchestrator", ORCHESTRATOR)])
    assert admission.find(B.public, 0) is None
    assert admission.find(C.public, 0) is None, "the list gives a pinned id another key"
    assert admission.find(A.public, 0)
    admission.pin(entry(C, "orchestrator", ORCHESTRATOR))  # moved, as the term record says
    assert admission.find(A.public, 0) is None
    assert admission.find(C.public, 0)
    assert changes == [0, 3, 4, 4]


@pytest.mark.parametrize(
    "entries", [[entry(A, "a"), entry(A, "b")], [entry(A, "a"), entry(B, "a")], [entry(A, "../a")],
                [entry(A, "a", "root")], [Admitted("x", "a", PNODE)]],
)  # fmt: skip
def test_a_list_that_contradicts_itself_changes_nothing(entries):
    admission = Admission([entry(C, "c")], version=1)
    with pytest.raises(ListError):
        admission.replace(2, entries)
    assert admission.version == 1
    assert admission.find(C.public, 0)
    assert not admission.find(A.public, 0)


def test_refusals_are_told_once_a_minute_and_in_all_not_too_often():
    log = RefusalLog()
    assert log.line("x", "first", 1000.0) == "first"
    assert not any(log.line("x", "again", 1000.0 + second) for second in range(1, 60))
    assert log.line("x", "again", 1000.0 + LOG_EVERY_S) == "again (59 refusals since the last line were not told)"
    lines = [log.line(f"key {number}", "t", 2000.0) for number in range(5000)]
    assert sum(map(bool, lines)) == LOG_LINES
    assert len(log._told) <= LOGGED_KEYS
    assert log.refused == 5061


# ---------------------------------------------------------------- roles


def test_every_message_has_a_role_that_may_send_it():
    allowed = frozenset().union(*MAY_SEND.values())
    assert set(all_messages().values()) == allowed
    assert set(MAY_SEND) == set(ROLES)


def test_no_role_acts_as_another():
    kinds = all_messages()

    def may(role: str) -> set[str]:
        return {tag for tag, kind in kinds.items() if kind in MAY_SEND[role]}

    assert may(JOIN) == {"join"}
    of_the_store = {tag for tag in kinds if tag.startswith("store_") and tag != "store_chunk"} | {
        "open_store",
        "probe_store",
    }
    assert may(PNODE) & may(CLIENT) == of_the_store
    assert may(STORAGE) == {"ok", "refused", "store_chunk"}
    assert not of_the_store & (may(ORCHESTRATOR) | may(JOIN))
    assert may(PNODE) & may(ORCHESTRATOR) == {"ok", "refused"}
    assert may(CLIENT) & may(ORCHESTRATOR) == set()
    assert {"prepare", "members", "release"} <= may(ORCHESTRATOR)
    assert {"create_session", "revoke", "shut_down"} <= may(CLIENT)
    assert not may_send("nobody", kinds["ok"]("r"))
