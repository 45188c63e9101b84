#!/usr/bin/env python3
"""Writes prompts in which a needle is hidden, for training and for evaluation.

A prompt is letters with a "<" and a letter somewhere, and ">" at its end. The completion is the letter
after "<". Chance finds one of eight letters.

With --shortest the prompts have from SHORTEST to LENGTH letters. A model learns from the short ones what to
look for, and soon finds it in the long ones too.
"""
import argparse
import json
import random

LETTERS = "abcdefgh"


def document(draw: random.Random, length: int) -> dict[str, str]:
    text = [draw.choice(LETTERS) for _ in range(length)]
    at = draw.randrange(length - 2)
    text[at] = "<"
    return {"prompt": "".join(text) + ">", "completion": text[at + 1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, required=True, help="letters of the longest prompt")
    parser.add_argument("--shortest", type=int, help="letters of the shortest prompt; LENGTH")
    parser.add_argument("--documents", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    shortest = options.shortest or options.length
    draw = random.Random(options.seed)
    with open(options.out, "w", encoding="utf-8") as out:
        for _ in range(options.documents):
            out.write(json.dumps(document(draw, draw.randint(shortest, options.length))) + "\n")


if __name__ == "__main__":
    main()
