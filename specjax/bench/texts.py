"""Prompts that ship with specjax, for a first look: eight of each of four kinds, written for it.

They are short, so that a small model on a small machine answers them in seconds. A claim about
speed needs real prompts of the work that it is about, and a hundred of them.
"""

from __future__ import annotations

SHIPPED = {
    "stories": (
        "Once upon a time a miller had three sons, and the youngest of them",
        "There was once a fox who lived under the bridge of a small town. One winter",
        "The old clock in the tower stopped at noon, and nobody in the village",
        "A girl found a key in the garden, behind the well. The next morning she",
        "The ship left the harbour before dawn. Only the cook knew that",
        "In a kingdom by the sea the queen gave every child a lantern, because",
        "My grandfather used to say that a river never forgets. When I was nine",
        "Two brothers built a house on the hill, and when the first snow fell",
    ),
    "questions": (
        "Question: Why does bread rise when it is left in a warm place?\nAnswer:",
        "Question: How can I keep a bicycle chain from rusting?\nAnswer:",
        "Question: Which planet is the largest, and how many moons does it have?\nAnswer:",
        "Question: What should I pack for three days in the mountains?\nAnswer:",
        "Question: How do bees tell each other where the flowers are?\nAnswer:",
        "Question: Why is the sky blue during the day and red at sunset?\nAnswer:",
        "Question: How long should I boil an egg so that it stays soft?\nAnswer:",
        "Question: What is the difference between a lake and a pond?\nAnswer:",
    ),
    "sums": (
        "Question: Anna has 12 apples and gives 5 to Ben. How many apples are left?\nAnswer:",
        "Question: A train runs 80 km in an hour. How far does it run in 3 hours?\nAnswer:",
        "Question: Four friends share 28 nuts. How many nuts does each of them get?\nAnswer:",
        "Question: A book has 240 pages. Tom reads 30 a day. How many days is that?\nAnswer:",
        "Question: A shirt costs 20 dollars and is sold at 15. What is saved on 4?\nAnswer:",
        "Question: A box holds 6 eggs. How many boxes do 54 eggs need in all?\nAnswer:",
        "Question: Mia saves 7 coins a week. How many has she after 9 weeks?\nAnswer:",
        "Question: A rope of 45 m is cut into 5 equal parts. How long is each?\nAnswer:",
    ),
    "code": (
        'def area(width, height):\n    """Return the area of a rectangle."""\n',
        'def is_even(number):\n    """Return whether a number is even."""\n',
        'def count_words(text):\n    """Return how often each word occurs."""\n    counts = {}\n',
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self,",
        'def largest(values):\n    """Return the largest value."""\n    best =',
        "def read_lines(path):\n    with open(path) as file:\n",
        'def reverse(text):\n    """Return a text from its end to its beginning."""\n',
        "for index, name in enumerate(names):\n    if name in seen:\n",
    ),
}
