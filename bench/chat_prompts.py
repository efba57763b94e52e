"""What people ask a chat model: questions of many kinds; stories, which repeat nothing; and code
with a name changed."""

from __future__ import annotations

from typing import NamedTuple

_HEROES = (
    "a lighthouse keeper who is afraid of the dark",
    "two sisters who find a map in a piano",
    "a robot that wants to learn to bake bread",
    "the last train of the year",
    "a boy who can hear what rivers say",
    "a clockmaker in a town without time",
    "a fox that moves into a library",
    "a letter that arrives forty years late",
    "an old ship that dreams of the mountains",
    "a painter who loses the colour blue",
    "a girl who sells rain at the market",
    "a dragon with a cold",
    "the night watch of a toy shop",
    "a violin that plays only at low tide",
    "a gardener on the moon",
    "a detective who cannot lie",
    "three brothers and one umbrella",
    "a teacher who turns into an owl at noon",
    "a village that wakes up on the back of a whale",
    "a spy who falls in love with her code book",
    "a snowman who walks south",
    "a chess player and the ghost of his rival",
    "a baker's cat in the year of the great flood",
    "an astronaut who comes home to the wrong century",
)


QUESTIONS = (
    "How do I get red wine out of a white shirt?",
    "Explain how a refrigerator keeps food cold.",
    "Write a Python function that returns the second largest number of a list.",
    "What should I pack for a weekend in the mountains?",
    "Give me three ideas for a rainy Sunday with children.",
    "Why is the sky blue?",
    "Write an email to my landlord about the broken heating.",
    "Summarize the plot of Romeo and Juliet in one paragraph.",
    "What are the benefits of drinking enough water?",
    "Write a short poem about the last day of summer.",
    "How does a bicycle stay upright?",
    "List five countries in South America and their capitals.",
    "What is the difference between a lawyer and a judge?",
    "Help me to write a toast for my brother's wedding.",
    "How many minutes are there in three and a half hours?",
    "Describe a typical day of a firefighter.",
    "Write a SQL query that counts the orders of each customer.",
    "What can I cook with potatoes, onions and cheese?",
    "Tell me about Marie Curie.",
    "Give me tips for my first day at a new job.",
    "Explain what a blockchain is to my grandmother.",
    "Write a dialogue between a cat and a dog about dinner.",
    "How do vaccines teach the body to fight a disease?",
    "Suggest a name and a motto for a small bookshop.",
)


class Snippet(NamedTuple):
    """Code, and names in it that may be changed to others."""

    code: str
    renames: tuple[tuple[str, str], ...]


_SNIPPETS = (
    Snippet(
        """def mean(values):
    total = 0.0
    count = 0
    for value in values:
        total += value
        count += 1
    if count == 0:
        raise ValueError("mean of nothing")
    return total / count
""",
        (("total", "running_sum"), ("value", "number"), ("count", "length")),
    ),
    Snippet(
        """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            return None
        return self.items.pop()
""",
        (("items", "elements"), ("item", "entry"), ("Stack", "Pile")),
    ),
    Snippet(
        """def binary_search(numbers, target):
    low = 0
    high = len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == target:
            return middle
        if numbers[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return None
""",
        (("middle", "centre"), ("numbers", "ordered"), ("target", "wanted")),
    ),
    Snippet(
        """function countWords(text) {
  const counts = {};
  for (const word of text.split(" ")) {
    if (word in counts) {
      counts[word] += 1;
    } else {
      counts[word] = 1;
    }
  }
  return counts;
}
""",
        (("counts", "table"), ("word", "token"), ("text", "sentence")),
    ),
    Snippet(
        """def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, value = line.partition("=")
            settings[key.strip()] = value.strip()
    return settings
""",
        (("settings", "options"), ("line", "row"), ("path", "file_name")),
    ),
    Snippet(
        """int gcd(int first, int second) {
    while (second != 0) {
        int rest = first % second;
        first = second;
        second = rest;
    }
    return first < 0 ? -first : first;
}
""",
        (("rest", "remainder"), ("first", "a"), ("second", "b")),
    ),
    Snippet(
        """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
""",
        (("balance", "funds"), ("amount", "sum_of_money"), ("owner", "holder")),
    ),
    Snippet(
        """def primes(limit):
    sieve = [True] * (limit + 1)
    found = []
    for number in range(2, limit + 1):
        if sieve[number]:
            found.append(number)
            for multiple in range(number * number, limit + 1, number):
                sieve[multiple] = False
    return found
""",
        (("sieve", "candidates"), ("number", "n"), ("limit", "maximum")),
    ),
)

STORIES = tuple(f"Tell me a story about {hero}." for hero in _HEROES)
RENAMES = tuple(
    f"Rewrite this code with `{old}` renamed to `{new}`, and change nothing else:\n\n"
    f"```\n{snippet.code}```"
    for turn in range(3)
    for snippet in _SNIPPETS
    for old, new in [snippet.renames[turn]]
)
