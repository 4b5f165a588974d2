"""Drawings: what a seed names, what captions and answers say."""

import hashlib

import numpy as np
import pytest

from kvconvert.data.drawings import CELL, GRAIN, PLACES, SIZE, Drawing, draw

DRAWINGS = [draw(5, index) for index in range(200)]


def occupied(drawing: Drawing) -> set[int]:
    """The cells in which anything brighter than the grain is drawn."""
    bright = drawing.image.max(2).reshape(3, CELL, 3, CELL).max((1, 3)) >= 2 * GRAIN
    return {int(cell) for cell in np.flatnonzero(bright)}


def cells(drawing: Drawing) -> set[int]:
    return {thing.cell for thing in drawing.things if not thing.is_word}


def test_a_seed_and_an_index_name_the_same_pixels_and_words_everywhere():
    digest = hashlib.sha256()
    for index in range(20):
        drawing = draw(0, index)
        digest.update(drawing.image.tobytes() + drawing.caption.encode())
    assert digest.hexdigest() == "465a6a122b01f1086e370175e412513df9e726bbdd70a38cc96f030a043e2c27"


def test_drawings_of_one_seed_and_of_two_differ():
    pixels = {draw(seed, index).image.tobytes() for seed in (0, 1) for index in range(50)}
    assert len(pixels) == 100


def test_an_image_is_a_square_of_bytes_in_three_colours():
    image = DRAWINGS[0].image
    assert (image.shape, image.dtype) == ((SIZE, SIZE, 3), np.uint8)
    assert image.flags.writeable


def test_things_are_drawn_in_the_places_that_the_caption_names_and_nowhere_else():
    for drawing in DRAWINGS:
        rows = {thing.cell // 3 for thing in drawing.things if thing.is_word}
        seen = occupied(drawing)
        assert {cell for cell in seen if cell // 3 not in rows} == cells(drawing)
        assert rows <= {cell // 3 for cell in seen}
        for thing in drawing.things:
            assert f"{thing.colour} " in drawing.caption
            assert thing.place in drawing.caption


def test_the_caption_is_an_answer_too():
    for drawing in DRAWINGS:
        assert drawing.caption in [question.answer for question in drawing.questions]


def test_answers_agree_with_the_things():
    forms = set()
    for drawing in DRAWINGS:
        for question in drawing.questions:
            words = question.text.rstrip("?").split()
            forms.add(words[0] + " " + words[1])
            if question.text.startswith("What colour is the") and words[-1] != "word":
                assert [thing.colour for thing in drawing.things if thing.name == words[-1]] == [question.answer]
            elif words[0] == "Where":
                asked = [thing for thing in drawing.things if (thing.colour, thing.name) == tuple(words[-2:])]
                assert [thing.place for thing in asked] == [question.answer]
            elif words[:2] == ["How", "many"] and words[-3:] == ["things", "are", "there"]:
                assert int(question.answer) == sum(thing.colour == words[2] for thing in drawing.things)
            elif words[:2] == ["Is", "there"]:
                pair = tuple(words[-2:])
                there = pair in {(thing.colour, thing.name) for thing in drawing.things}
                assert question.answer == ("yes" if there else "no")
            elif question.text.startswith("What is at the"):
                cell = PLACES.index(question.text.removeprefix("What is at the ").rstrip("?"))
                assert (question.answer == "nothing") == (cell not in occupied_or_word(drawing))
    assert len(forms) >= 7


def occupied_or_word(drawing: Drawing) -> set[int]:
    rows = {thing.cell // 3 for thing in drawing.things if thing.is_word}
    return cells(drawing) | {3 * row + column for row in rows for column in range(3)}


@pytest.mark.parametrize("form", ["What colour is the", "Where is", "What is at", "Which word", "How many", "Is there"])
def test_no_answer_is_so_frequent_that_guessing_it_passes_for_seeing(form):
    answers = [q.answer for d in DRAWINGS for q in d.questions if q.text.startswith(form)]
    assert max(answers.count(answer) for answer in set(answers)) <= 0.6 * len(answers)
