"""Text as it arrives: a broken character is never shown, and a text that ends is cut."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.generation.text import StopStrings, TextStream
from tests.support.random_models import CONFIG


class ByteTokenizer:
    """One token per byte, as far as a vocabulary of 96 goes."""

    def encode(self, text: str) -> list[int]:
        return [byte % CONFIG.vocab_size for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_a_character_of_several_tokens_appears_once_it_is_whole() -> None:
    stream = TextStream(ByteTokenizer(), [65])
    shown = [stream.push([byte]) for byte in "é😀b".encode()]
    assert shown == ["", "é", "", "", "", "😀", "b"]
    assert stream.push([255]) == "" and stream.push([99]) == "\ufffdc"
    assert stream.push([255]) == "" and stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_prompt_may_end_within_a_character() -> None:
    first, *rest = "é".encode()
    stream = TextStream(ByteTokenizer(), [65, first])
    assert stream.push(rest) == "é"


def test_a_stream_ends_before_the_first_of_its_stops() -> None:
    stream = TextStream(ByteTokenizer(), [65], ("\n\n", "bcd"))
    assert "".join(stream.push([byte]) for byte in b"a\nb\nbce\n\nf") == "a\nb\nbce"
    assert stream.ended
    assert stream.peek([97]) == "" and stream.finish() == ""


def test_what_may_begin_a_stop_waits() -> None:
    stream = TextStream(ByteTokenizer(), [65], ("bcd",))
    assert [stream.push([byte]) for byte in b"abcbc"] == ["a", "", "", "bc", ""]
    assert not stream.ended and stream.finish() == "bc"


def test_peek_shows_and_changes_nothing() -> None:
    stream = TextStream(ByteTokenizer(), list(range(65, 90)))
    assert stream.peek([97, 98]) == "ab" and stream.peek([]) == ""
    assert stream.push([99]) == "c"


def test_a_long_text_is_the_same_in_any_pieces() -> None:
    """Characters of several bytes lie across every place at which a stream may settle its text."""
    whole = "a–é😀 " * 80
    ids = list(whole.encode())
    for size in (1, 3, 7, 150, 1000):
        stream = TextStream(ByteTokenizer(), [65])
        pieces = [stream.push(ids[first : first + size]) for first in range(0, len(ids), size)]
        assert "".join(pieces) + stream.finish() == whole
        assert stream.peek([98]) == "b"
    stopped = TextStream(ByteTokenizer(), [65], (whole[200:220] + "!",))
    ids = list((whole[:220] + "!" + whole).encode())
    assert "".join(stopped.push([each]) for each in ids) == whole[:200] and stopped.ended


def test_a_stop_watch_sees_what_the_whole_text_shows() -> None:
    """Also of an output that became shorter, as where the first token that ends it is sought."""
    stops, codec = ("\n\n", "é!", "end"), ByteTokenizer()
    prompt = list(b"a text")
    for text in ("b é!", "b é?" * 40 + " the end.", "some\n\nmore", "nothing " * 40):
        output, watch = list(text.encode()), StopStrings(codec, [prompt], stops)
        lengths = range(1, len(output) + 1)
        for length in (*lengths, *reversed(lengths), *lengths[::9]):
            expected = any(stop in codec.decode(output[:length]) for stop in stops)
            assert watch(0, output[:length]) == expected, (text, length)


def test_the_time_to_watch_for_stops_does_not_grow_with_the_output(monkeypatch) -> None:
    decode, decoded = ByteTokenizer.decode, list[int]()

    def counted(self: ByteTokenizer, ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(ByteTokenizer, "decode", counted)
    watch = StopStrings(ByteTokenizer(), [[65]], ("end",))
    assert not any(watch(0, [97] * length) for length in range(1, 1000))
    assert max(decoded) < 200
