"""Generates a text of small stories, whose letters depend on the letters just before and whose words on earlier ones.

    On a windy day Ada of Brill had a kite. The old fox slept under the bridge. The lonely duck ran near the fence.
    So the windy day ended, and Ada took the kite home to Brill.

Spelling and grammar need short memory. The last sentence repeats four words that occurred once, at the beginning: the
day, the name, the thing and the place. Every choice is uniform, so the entropy of the text is known.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import string
from dataclasses import dataclass, field

ALPHABET = "\n .," + string.ascii_uppercase + string.ascii_lowercase  # a character's number is its index


def words(together: str) -> list[str]:
    return together.split()


DAYS = words("bright cloudy dusty foggy frosty golden icy long misty quiet rainy snowy sunny warm wet windy")
NAMES = words("Ada Bruno Clara Dario Elsa Felix Greta Hugo Iris Jonas Kira Leo Mona Nils Olga Paul")
PLACES = words(
    "Arden Brill Corvan Dunmar Elling Farro Gossen Hulm Ister Jarrin Kelby Lorne Mardle Norrvik Orben Pellan"
)
THINGS = words("bell cup drum flute globe hat jar kite lamp map net pipe rope sail top wheel")
ADJECTIVES = words("big brave brown clever fat grey happy hungry little lonely old red shy small tired young")
ANIMALS = words("bear cat crow dog duck fox frog goat hare hen horse mouse owl pig sheep wolf")
VERBS = words("danced dreamed hid jumped laughed looked played ran rested sang sat slept stood waited walked worked")
ASKED = {"day": DAYS, "name": NAMES, "thing": THINGS, "place": PLACES}
PREPOSITIONS = ["behind", "beside", "near", "under"]
SPOTS = words("barn bench bridge bush fence gate hill house lake mill oak river road stone tower wall")
FILLERS = 2


@dataclass
class Stories:
    """A text that grows by stories.

    starts: index of each story. bits: entropy of the choice at every character. recalls: (first, end, kind) of the
    words to recall.
    """

    random: random.Random
    parts: list[str] = field(default_factory=list)
    length: int = 0
    bits: list[float] = field(default_factory=list)
    recalls: list[tuple[int, int, str]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def say(self, said: str, bits: float = 0.0) -> None:
        self.parts.append(said)
        self.length += len(said)
        self.bits += [bits] + [0.0] * (len(said) - 1)

    def choose(self, options: list[str]) -> str:
        word = self.random.choice(options)
        self.say(word, math.log2(len(options)))
        return word

    def recall(self, word: str, kind: str) -> None:
        self.recalls.append((self.length, self.length + len(word), kind))
        self.say(word)

    def recalls_between(self, start: int, end: int) -> list[tuple[int, int, str]]:
        """Returns the recalls that lie entirely in the range."""
        begin = bisect.bisect_left(self.recalls, (start,))
        past = itertools.islice(self.recalls, begin, None)
        return list(itertools.takewhile(lambda recall: recall[1] <= end, past))

    def tell(self) -> None:
        """Adds one story of less than 250 characters."""
        self.starts.append(self.length)
        self.say("On a ")
        day = self.choose(DAYS)
        self.say(" day ")
        name = self.choose(NAMES)
        self.say(" of ")
        place = self.choose(PLACES)
        self.say(" had a ")
        thing = self.choose(THINGS)
        self.say(".")
        for _ in range(FILLERS):
            self.describe()
        self.say(" So the ")
        self.recall(day, "day")
        self.say(" day ended, and ")
        self.recall(name, "name")
        self.say(" took the ")
        self.recall(thing, "thing")
        self.say(" home to ")
        self.recall(place, "place")
        self.say(".\n")

    def describe(self) -> None:
        self.say(" The")
        for options in (ADJECTIVES, ANIMALS, VERBS, PREPOSITIONS):
            self.say(" ")
            self.choose(options)
        self.say(" the ")
        self.choose(SPOTS)
        self.say(".")


def make_stories(characters: int, seed: int = 0) -> Stories:
    """Returns whole stories of at least this many characters; the same for the same seed."""
    stories = Stories(random.Random(seed))
    while stories.length < characters:
        stories.tell()
    return stories
