"""Stop strings in a growing text; the stream of the tests makes each token id the character it stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from diffulex.engine.stopping import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence


class Characters:
    """Ids are code points; the last character may be held back as an unfinished one would be."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, ids: Sequence[int]) -> str:
        text = self.held + "".join(map(chr, ids))
        self.held = "?" if text.endswith("?") else ""
        return text.removesuffix("?")


def first_stop(
    pieces: Sequence[str], stops: Sequence[str], marker: str | None = None
) -> tuple[int, int] | None:
    """Number of the piece at which a stop string is found, and its offset."""
    search = StopStrings(stops, marker, Characters())
    for number, piece in enumerate(pieces):
        offset = search.push([ord(letter) for letter in piece])
        if offset is not None:
            return number, offset
    return None


def test_the_text_is_cut_at_the_beginning_of_the_stop_string() -> None:
    assert first_stop(["one STOP two"], [" STOP"]) == (0, 3)
    assert first_stop(["STOP"], ["STOP"]) == (0, 0)


def test_a_text_without_it_goes_on() -> None:
    assert first_stop(["one ", "ST", "oP"], ["STOP"]) is None


def test_the_earliest_of_several_wins_whatever_their_order() -> None:
    for stops in (["Question:", "</s>"], ["</s>", "Question:"]):
        assert first_stop(["a </s> Question: b"], stops) == (0, 2)


@pytest.mark.parametrize("cut", range(1, 5))
def test_b15_a_stop_string_may_begin_in_one_piece_and_end_in_another(cut: int) -> None:
    text = "ab" + "STOPS"[:cut], "STOPS"[cut:] + "cd"
    assert first_stop(text, ["STOPS"]) == (1, 2)


def test_b15_a_stop_string_may_span_many_pieces() -> None:
    assert first_stop(["x", *"\nQuestion", ":"], ["\nQuestion:", "zzz"]) == (10, 1)


def test_a_held_back_character_is_searched_when_it_arrives() -> None:
    assert first_stop(["ab?", "c"], ["?c"]) == (1, 2)


def test_with_a_marker_stops_count_only_behind_the_thinking_part() -> None:
    pieces = ["<think>a STOP b</think>answer", " STOP extra"]
    assert first_stop(pieces, [" STOP"], "</think>") == (1, len("<think>a STOP b</think>answer"))
    assert first_stop(pieces, [" STOP"]) == (0, len("<think>a"))


def test_without_a_thinking_part_the_marker_changes_nothing() -> None:
    assert first_stop(["answer STOP x </think> STOP"], [" STOP"], "</think>") == (0, 6)


def test_space_before_the_thinking_part_is_allowed() -> None:
    assert first_stop(["\n <think> STOP</think>b STOP"], [" STOP"], "</think>") == (0, 23)


@pytest.mark.parametrize("length", range(1, 8))
def test_a_thinking_part_that_arrives_in_pieces_is_recognised(length: int) -> None:
    text = "<think>th</think>ok th"
    assert first_stop([text[:length], text[length:]], ["th"], "</think>") == (1, text.rindex("th"))


def test_a_text_that_only_begins_like_a_thinking_part_is_searched_from_its_beginning() -> None:
    assert first_stop(["<th", "ree STOP"], ["th"], "</think>") == (1, 1)


@pytest.mark.parametrize("cut", range(8))
def test_a_marker_that_arrives_in_pieces_is_recognised(cut: int) -> None:
    marker = "</think>"
    pieces = ["<think>a", marker[:cut], marker[cut:] + "b", "x>b"]
    assert first_stop(pieces, [">b"], marker) == (3, len("<think>a</think>bx"))


def test_an_unfinished_thinking_part_never_stops() -> None:
    assert first_stop(["<think> STOP", " STOP </thin"], ["STOP"], "</think>") is None
