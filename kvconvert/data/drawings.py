"""Small drawings with captions and questions: the image data that ships with kvconvert, made from a seed.

A drawing is a dark square of 96 x 96 pixels, divided into three rows of three places. Two to six things stand in it:
shapes, digits, letters, and sometimes one short word that fills a row; each has a colour. What is drawn is chosen by
`random.Random`, the grain of the background by PCG64's raw stream: both are stable over versions of Python and numpy,
so a seed and an index name the same pixels everywhere. Glyphs are bitmaps of five by seven points, kept here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from kvconvert.errors import listed

SIZE = 96
CELL = SIZE // 3
GRAIN = 16  # the background's pixels lie in 16 to 31 of 255
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 190, 60),
    "blue": (60, 90, 245),
    "yellow": (240, 225, 50),
    "orange": (245, 140, 20),
    "purple": (150, 50, 190),
    "cyan": (50, 210, 225),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
PLACES = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
ROWS = ("top row", "middle row", "bottom row")
_WORDS = """
ANT ARM BAT BED BEE BIRD BOAT BOOK BOX BUS CAKE CAR CAT COIN COW CUP DESK DOG DOOR DUCK EAR EGG EYE FARM FISH FLAG FOX
FROG GATE GIFT GOAT HAT HEN HILL HOME ICE INK IRON JAM JAR KEY KING KITE LAMP LEAF LEG LION LOCK MAP MILK MOON NAIL NEST
NET NUT OAK OWL PEN PIE PIG POND QUIZ RAIN RING ROAD ROSE SEA SHIP SKY SNOW STAR SUN TAXI TEA TOP TREE VAN VASE WALL WAX
WIND WOLF YAK YARN ZERO ZOO
"""
WORDS = _WORDS.split()
# Seven rows of five points per glyph, top row first, the leftmost point in bit 4.
_GLYPHS = {
    "0": "0E 11 13 15 19 11 0E",
    "1": "04 0C 04 04 04 04 0E",
    "2": "0E 11 01 06 08 10 1F",
    "3": "1F 02 04 02 01 11 0E",
    "4": "02 06 0A 12 1F 02 02",
    "5": "1F 10 1E 01 01 11 0E",
    "6": "06 08 10 1E 11 11 0E",
    "7": "1F 01 02 04 08 08 08",
    "8": "0E 11 11 0E 11 11 0E",
    "9": "0E 11 11 0F 01 02 0C",
    "A": "0E 11 11 1F 11 11 11",
    "B": "1E 11 11 1E 11 11 1E",
    "C": "0E 11 10 10 10 11 0E",
    "D": "1E 11 11 11 11 11 1E",
    "E": "1F 10 10 1E 10 10 1F",
    "F": "1F 10 10 1E 10 10 10",
    "G": "0E 11 10 17 11 11 0E",
    "H": "11 11 11 1F 11 11 11",
    "I": "0E 04 04 04 04 04 0E",
    "J": "07 02 02 02 02 12 0C",
    "K": "11 12 14 18 14 12 11",
    "L": "10 10 10 10 10 10 1F",
    "M": "11 1B 15 15 11 11 11",
    "N": "11 19 15 13 11 11 11",
    "O": "0E 11 11 11 11 11 0E",
    "P": "1E 11 11 1E 10 10 10",
    "Q": "0E 11 11 11 15 12 0D",
    "R": "1E 11 11 1E 14 12 11",
    "S": "0F 10 10 0E 01 01 1E",
    "T": "1F 04 04 04 04 04 04",
    "U": "11 11 11 11 11 11 0E",
    "V": "11 11 11 11 11 0A 04",
    "W": "11 11 11 15 15 1B 11",
    "X": "11 11 0A 04 0A 11 11",
    "Y": "11 11 0A 04 04 04 04",
    "Z": "1F 01 02 04 08 10 1F",
}
DIGITS, LETTERS = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BITMAPS = {
    name: np.array([[int(row, 16) >> bit & 1 for bit in (4, 3, 2, 1, 0)] for row in rows.split()], dtype=bool)
    for name, rows in _GLYPHS.items()
}
_POINT = 3  # pixels of a glyph's point


@dataclass(frozen=True)
class Thing:
    """One thing of a drawing.

    Attributes:
        name: a shape's name, a digit, a letter, or a word of several letters.
        colour: a name of `COLOURS`.
        cell: index into `PLACES`; of a word the leftmost place of its row.
    """

    name: str
    colour: str
    cell: int

    @property
    def is_word(self) -> bool:
        """Whether it is a word, which fills a row."""
        return len(self.name) > 1 and self.name.isupper()

    @property
    def kind(self) -> str:
        """One of shape, digit, letter, word."""
        if self.name in SHAPES:
            return "shape"
        return "digit" if self.name.isdigit() else "word" if self.is_word else "letter"

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        return ROWS[self.cell // 3] if self.is_word else PLACES[self.cell]

    def __str__(self) -> str:
        if self.is_word:
            return f"the {self.colour} word {self.name}"
        return f"{'an' if self.colour == 'orange' else 'a'} {self.colour} {self.name}"


@dataclass(frozen=True)
class Question:
    """A question about one drawing, and its only right answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Drawing:
    """A picture and what is known about it.

    Attributes:
        image: uint8 [96, 96, 3], red, green, blue.
        things: what it shows, in reading order.
        caption: one sentence naming every thing, its colour and its place.
        questions: one of each form that has a single answer here, in a drawn order.
    """

    image: np.ndarray
    things: tuple[Thing, ...]
    caption: str
    questions: tuple[Question, ...]


def draw(seed: int, index: int) -> Drawing:
    """The drawing number `index` of a seed; equal arguments give equal pixels and words."""
    chance = random.Random(f"drawing {seed} {index}")
    things = _scene(chance)
    grain = np.random.PCG64([seed, index]).random_raw(SIZE * SIZE * 3 // 8)
    image = (grain.astype("<u8").view(np.uint8) % GRAIN + GRAIN).reshape(SIZE, SIZE, 3)
    for thing in things:
        _stamp(image, thing, chance)
    return Drawing(image, things, _caption(things), tuple(_questions(things, chance)))


def _scene(chance: random.Random) -> tuple[Thing, ...]:
    cells, things = list(range(9)), []
    # A few colours and names per drawing, so that several things share one and questions need both.
    colours = chance.sample(list(COLOURS), chance.randrange(2, 6))
    if chance.random() < 0.4:
        row = chance.randrange(3)
        cells = [cell for cell in cells if cell // 3 != row]
        things.append(Thing(chance.choice(WORDS), chance.choice(colours), 3 * row))
    names = [
        chance.choice(chance.choices((SHAPES, DIGITS, LETTERS), weights=(2, 1, 1))[0])
        for _ in range(chance.randrange(2, 6))
    ]
    for cell in chance.sample(cells, chance.randrange(2, 6)):
        things.append(Thing(chance.choice(names), chance.choice(colours), cell))
    return tuple(sorted(things, key=lambda thing: thing.cell))


def _stamp(image: np.ndarray, thing: Thing, chance: random.Random) -> None:
    mask = _word_mask(thing.name) if thing.name not in SHAPES else _shape_mask(thing.name, chance.uniform(9, 13))
    height, width = mask.shape
    row, column = divmod(thing.cell, 3)
    room = SIZE if thing.is_word else CELL
    top = row * CELL + chance.randrange(1, CELL - height)
    left = column * CELL + chance.randrange(1, room - width)
    shade = [min(255, max(0, part + chance.randrange(-12, 13))) for part in COLOURS[thing.colour]]
    image[top : top + height, left : left + width][mask] = shade


def _word_mask(letters: str) -> np.ndarray:
    """bool [21, 18 n - 3] of n glyphs side by side."""
    gap = np.zeros((7, 1), dtype=bool)
    points = np.concatenate([part for letter in letters for part in (_BITMAPS[letter], gap)][:-1], axis=1)
    return points.repeat(_POINT, 0).repeat(_POINT, 1)


def _shape_mask(name: str, radius: float) -> np.ndarray:
    """bool [n, n] of a shape that fits a circle or square of this radius in pixels."""
    n = 2 * int(np.ceil(radius))
    y, x = np.mgrid[:n, :n] - (n - 1) / 2
    if name == "square":
        return np.maximum(abs(x), abs(y)) <= 0.85 * radius
    if name == "triangle":
        return (abs(x) <= (y + radius) / 2) & (y <= 0.85 * radius)
    if name == "cross":
        return (np.minimum(abs(x), abs(y)) <= 0.3 * radius) & (np.maximum(abs(x), abs(y)) <= radius)
    if name == "diamond":
        return abs(x) + abs(y) <= radius
    distance = np.hypot(x, y)
    return (distance <= radius) & (distance >= (0.55 * radius if name == "ring" else 0))


def _caption(things: tuple[Thing, ...]) -> str:
    named = [f"{thing} {'in' if thing.is_word else 'at'} the {thing.place}" for thing in things]
    text = listed(named)
    return text[0].upper() + text[1:] + "."


def _at(things: tuple[Thing, ...], cell: int) -> str:
    """What stands at a place: a word stands at all three of its row."""
    for thing in things:
        if thing.cell == cell or (thing.is_word and thing.cell // 3 == cell // 3):
            return str(thing)
    return "nothing"


def _questions(things: tuple[Thing, ...], chance: random.Random) -> list[Question]:
    """One question of each form that these things allow."""
    singles = [thing for thing in things if not thing.is_word]
    names, pairs = ([key(thing) for thing in singles] for key in (lambda t: t.name, lambda t: (t.colour, t.name)))
    only_name = [thing for thing in singles if names.count(thing.name) == 1]
    only_pair = [thing for thing in singles if pairs.count((thing.colour, thing.name)) == 1]
    found = [Question("Describe the picture.", _caption(things))]
    if only_name:
        thing = chance.choice(only_name)
        found.append(Question(f"What colour is the {thing.name}?", thing.colour))
    if only_pair:
        thing = chance.choice(only_pair)
        found.append(Question(f"Where is the {thing.colour} {thing.name}?", thing.place))
        thing = chance.choice(only_pair)
        step, word = chance.choice(((-3, "above"), (3, "below"), (-1, "left of"), (1, "right of")))
        if 0 <= thing.cell + step < 9 and (abs(step) == 3 or (thing.cell + step) // 3 == thing.cell // 3):
            answer = _at(things, thing.cell + step)
            found.append(Question(f"What is {word} the {thing.colour} {thing.name}?", answer))
    cell = chance.choice(singles).cell if chance.random() < 0.7 else chance.randrange(9)
    found.append(Question(f"What is at the {PLACES[cell]}?", _at(things, cell)))
    word = next((thing for thing in things if thing.is_word), None)
    if word is not None:
        found.append(Question("Which word is written?", word.name))
        found.append(Question("What colour is the word?", word.colour))
    colour = chance.choice([thing.colour for thing in things])
    found.append(Question(f"How many {colour} things are there?", str(sum(t.colour == colour for t in things))))
    kind = chance.choice(("shape", "digit", "letter"))
    found.append(Question(f"How many {kind}s are there?", str(sum(t.kind == kind for t in things))))
    asked = chance.choice(singles)
    colour = asked.colour if chance.random() < 0.5 else chance.choice(list(COLOURS))
    answer = "yes" if (colour, asked.name) in pairs else "no"
    found.append(Question(f"Is there {Thing(asked.name, colour, 0)}?", answer))
    chance.shuffle(found)
    return found
