"""Small programming tasks with hidden tests, for `data.path: world:code`: nothing to download.

A row has the `prompt`, the name of the `function` to write, its `tests` (see `alignment.rewards.code_cases`) and a
`solution`; for supervised training it has the prompt and the solution as a reply. Prompts show no test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["prompts", "sft"]

ASK = "Write a Python function {signature} that {what}. Reply with one block of code."


@dataclass(frozen=True, slots=True)
class Task:
    """A function to write: its signature, what it does, the body of a solution, and (arguments, value) of each test."""

    signature: str
    what: str
    body: str
    tests: tuple[tuple[list[Any], Any], ...]

    @property
    def function(self) -> str:
        return self.signature.partition("(")[0]

    @property
    def solution(self) -> str:
        lines = "".join(f"    {line}\n" if line else "\n" for line in self.body.strip().split("\n"))
        return f"def {self.signature}:\n{lines}"

    def row(self, kind: Kind) -> dict[str, Any]:
        prompt = [{"role": "user", "content": ASK.format(signature=self.signature, what=self.what)}]
        if kind == "sft":
            return {"messages": [*prompt, {"role": "assistant", "content": f"```python\n{self.solution}```"}]}
        tests = [{"call": arguments, "returns": value} for arguments, value in self.tests]
        named = {"function": self.function, "tests": json.dumps(tests), "solution": self.solution}
        return {"prompt": prompt, **named}


def rows(kind: Kind) -> list[dict[str, Any]]:
    """All tasks in the public format of that kind of data."""
    return [task.row(kind) for task in TASKS]


TASKS = (
    Task(
        "add(a, b)",
        "returns the sum of two numbers",
        "return a + b",
        (([2, 3], 5), ([-4, 4], 0), ([0.5, 0.25], 0.75)),
    ),
    Task(
        "is_even(n)",
        "tells whether an integer is even",
        "return n % 2 == 0",
        (([4], True), ([7], False), ([0], True), ([-3], False)),
    ),
    Task(
        "factorial(n)",
        "returns n! for an integer n of at least 0",
        "product = 1\nfor factor in range(2, n + 1):\n    product *= factor\nreturn product",
        (([0], 1), ([1], 1), ([5], 120), ([20], 2432902008176640000)),
    ),
    Task(
        "fibonacci(n)",
        "returns the n-th Fibonacci number, where fibonacci(0) is 0 and fibonacci(1) is 1",
        "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
        (([0], 0), ([1], 1), ([10], 55), ([50], 12586269025)),
    ),
    Task(
        "is_prime(n)",
        "tells whether a positive integer is a prime number",
        "if n < 2:\n    return False\nfactor = 2\nwhile factor * factor <= n:\n    if n % factor == 0:\n"
        "        return False\n    factor += 1\nreturn True",
        (([1], False), ([2], True), ([91], False), ([97], True), ([7919], True)),
    ),
    Task(
        "gcd(a, b)",
        "returns the greatest common divisor of two positive integers",
        "while b:\n    a, b = b, a % b\nreturn a",
        (([12, 18], 6), ([17, 5], 1), ([100, 10], 10)),
    ),
    Task(
        "digit_sum(n)",
        "returns the sum of the decimal digits of an integer, whatever its sign",
        "return sum(int(digit) for digit in str(abs(n)))",
        (([0], 0), ([1234], 10), ([-905], 14)),
    ),
    Task(
        "reverse_words(text)",
        "returns the words of a text in reverse order, joined by single spaces",
        'return " ".join(reversed(text.split()))',
        ((["one two three"], "three two one"), (["  a   b "], "b a"), ([""], "")),
    ),
    Task(
        "is_palindrome(text)",
        "tells whether a text reads the same backwards, looking at letters and digits alone and not at their case",
        "kept = [sign.lower() for sign in text if sign.isalnum()]\nreturn kept == kept[::-1]",
        ((["Level"], True), (["A man, a plan, a canal: Panama"], True), (["hello"], False), ([""], True)),
    ),
    Task(
        "count_vowels(text)",
        "counts the letters a, e, i, o and u in a text, in either case",
        'return sum(sign in "aeiou" for sign in text.lower())',
        ((["Education"], 5), (["rhythm"], 0), (["AaA"], 3)),
    ),
    Task(
        "word_counts(text)",
        "returns a dictionary from each word of a lower-case text to how often it occurs",
        "counts = {}\nfor word in text.split():\n    counts[word] = counts.get(word, 0) + 1\nreturn counts",
        ((["a b a"], {"a": 2, "b": 1}), ([""], {}), (["x x x"], {"x": 3})),
    ),
    Task(
        "flatten(items)",
        "returns a flat list of the numbers in a list that may hold lists at any depth",
        "flat = []\nfor item in items:\n    if isinstance(item, list):\n        flat.extend(flatten(item))\n"
        "    else:\n        flat.append(item)\nreturn flat",
        (([[1, [2, [3]], 4]], [1, 2, 3, 4]), ([[]], []), ([[[[5]]]], [5])),
    ),
    Task(
        "two_sum(numbers, target)",
        "returns the positions [i, j], i before j, of the only two numbers in a list whose sum is the target",
        "seen = {}\nfor j, number in enumerate(numbers):\n    if target - number in seen:\n"
        "        return [seen[target - number], j]\n    seen[number] = j\nreturn None",
        (([[2, 7, 11, 15], 9], [0, 1]), ([[3, 2, 4], 6], [1, 2]), ([[5, 5], 10], [0, 1])),
    ),
    Task(
        "unique(items)",
        "returns the items of a list without repetitions, in the order of their first occurrence",
        "return list(dict.fromkeys(items))",
        (([[3, 1, 3, 2, 1]], [3, 1, 2]), ([[]], []), ([["b", "a", "b"]], ["b", "a"])),
    ),
    Task(
        "second_largest(numbers)",
        "returns the second largest of the different numbers in a list, or None where there are fewer than two",
        "different = sorted(set(numbers))\nreturn different[-2] if len(different) > 1 else None",
        (([[4, 9, 9, 7]], 7), ([[1, 1]], None), ([[-1, -2]], -2)),
    ),
    Task(
        "median(numbers)",
        "returns the median of a list of at least one number",
        "ordered = sorted(numbers)\nhalf = len(ordered) // 2\nif len(ordered) % 2:\n    return ordered[half]\n"
        "return (ordered[half - 1] + ordered[half]) / 2",
        (([[3, 1, 2]], 2), ([[4, 1, 3, 2]], 2.5), ([[7]], 7)),
    ),
    Task(
        "rotate(items, k)",
        "returns a list whose items are those of another one moved k places to the right, the last ones coming first",
        "if not items:\n    return []\nk %= len(items)\nreturn items[-k:] + items[:-k] if k else list(items)",
        (([[1, 2, 3, 4], 1], [4, 1, 2, 3]), ([[1, 2, 3], 4], [3, 1, 2]), ([[], 3], []), ([[1, 2], 0], [1, 2])),
    ),
    Task(
        "balanced(text)",
        "tells whether the brackets (), [] and {} in a text are closed in the right order",
        'pairs = {")": "(", "]": "[", "}": "{"}\nopened = []\nfor sign in text:\n    if sign in "([{":\n'
        "        opened.append(sign)\n    elif sign in pairs and (not opened or opened.pop() != pairs[sign]):\n"
        "        return False\nreturn not opened",
        ((["([]{})"], True), (["(]"], False), (["(("], False), (["a(b)c"], True), ([")"], False)),
    ),
    Task(
        "to_roman(n)",
        "writes an integer from 1 to 3999 as a Roman numeral",
        'values = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"),\n'
        '          (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]\ntext = ""\n'
        "for value, sign in values:\n    text += sign * (n // value)\n    n %= value\nreturn text",
        (([4], "IV"), ([1994], "MCMXCIV"), ([3999], "MMMCMXCIX"), ([8], "VIII")),
    ),
    Task(
        "binary_search(numbers, target)",
        "returns the position of a number in a sorted list without repetitions, or -1 where it is not there",
        "low, high = 0, len(numbers)\nwhile low < high:\n    middle = (low + high) // 2\n"
        "    if numbers[middle] < target:\n        low = middle + 1\n    else:\n        high = middle\n"
        "return low if low < len(numbers) and numbers[low] == target else -1",
        (([[1, 3, 5, 7], 5], 2), ([[1, 3, 5, 7], 4], -1), ([[], 1], -1), ([[2], 2], 0)),
    ),
    Task(
        "merge(first, second)",
        "merges two sorted lists into one sorted list",
        "merged = []\ni = j = 0\nwhile i < len(first) and j < len(second):\n    if first[i] <= second[j]:\n"
        "        merged.append(first[i])\n        i += 1\n    else:\n        merged.append(second[j])\n"
        "        j += 1\nreturn merged + first[i:] + second[j:]",
        (([[1, 4], [2, 3]], [1, 2, 3, 4]), ([[], [1]], [1]), ([[2], []], [2])),
    ),
    Task(
        "transpose(matrix)",
        "returns the transpose of a matrix given as a list of rows of equal length",
        "return [list(column) for column in zip(*matrix)]",
        (([[[1, 2], [3, 4]]], [[1, 3], [2, 4]]), ([[[1, 2, 3]]], [[1], [2], [3]]), ([[]], [])),
    ),
    Task(
        "run_lengths(text)",
        "returns a list of [letter, length] for each run of equal letters in a text",
        "runs = []\nfor sign in text:\n    if runs and runs[-1][0] == sign:\n        runs[-1][1] += 1\n    else:\n"
        "        runs.append([sign, 1])\nreturn runs",
        ((["aabccc"], [["a", 2], ["b", 1], ["c", 3]]), ([""], []), (["z"], [["z", 1]])),
    ),
    Task(
        "coin_ways(amount, coins)",
        "counts the ways to pay an amount with coins of the given values, each as often as wanted, in any order",
        "ways = [1] + [0] * amount\nfor coin in coins:\n    for total in range(coin, amount + 1):\n"
        "        ways[total] += ways[total - coin]\nreturn ways[amount]",
        (([5, [1, 2, 5]], 4), ([3, [2]], 0), ([0, [1]], 1), ([10, [1, 5, 10]], 4)),
    ),
)
