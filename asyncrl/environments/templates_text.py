"""Templates over text."""

from __future__ import annotations

from random import Random

from asyncrl.environments.templates import (
    Arguments,
    Template,
    one_sentence,
    one_word,
    positive,
    sentence,
    word,
    word_list,
    words,
)


def _maybe_palindrome(random: Random) -> Arguments:
    text = word(random)
    return (text + text[::-1] if random.random() < 0.4 else text,)


def _maybe_anagram(random: Random) -> Arguments:
    a = word(random)
    return (a, "".join(random.sample(a, len(a))) if random.random() < 0.5 else word(random))


def _maybe_prefix(random: Random) -> Arguments:
    text = word(random)
    return (text, random.choice((text[:2], text[-2:], word(random)[:1])))


def _maybe_same_letters(random: Random) -> Arguments:
    a = word(random)
    return (a.capitalize(), random.choice((a, a.upper(), word(random))))


TEMPLATES = (
    Template(
        name="first_word",
        says="Return the first word of the text.",
        code="def first_word(text):\n    return text.split()[0]\n",
        bugs=(("[0]", "[-1]"), ("[0]", "[1]")),
        draw=one_sentence,
    ),
    Template(
        name="count_vowels",
        says="Return the number of vowels in the lower-case text.",
        code='def count_vowels(text):\n    return len([c for c in text if c in "aeiou"])\n',
        bugs=(('c in "', 'c not in "'), ('"aeiou"', '"abcde"')),
        draw=one_word,
    ),
    Template(
        name="is_palindrome",
        says="Return True if the text reads the same backwards.",
        code="def is_palindrome(text):\n    return text == text[::-1]\n",
        bugs=(("==", "!="), ("[::-1]", "[1:]")),
        draw=_maybe_palindrome,
    ),
    Template(
        name="shout",
        says="Return the text in upper case.",
        code="def shout(text):\n    return text.upper()\n",
        bugs=(("upper()", "lower()"), ("text.upper()", "text")),
        draw=one_word,
    ),
    Template(
        name="greet",
        says='Return "Hello, " followed by the name.',
        code='def greet(name):\n    return "Hello, " + name\n',
        bugs=(('"Hello, " + name', 'name + "Hello, "'), ('"Hello, " + name', '"Hello, "')),
        draw=lambda r: (word(r).capitalize(),),
    ),
    Template(
        name="count_words",
        says="Return the number of words in the text.",
        code="def count_words(text):\n    return len(text.split())\n",
        bugs=(("text.split()", "text"), ("len(text.split())", "text.split()")),
        draw=lambda r: (sentence(r, 1, 5),),
    ),
    Template(
        name="initials",
        says="Return the first letters of the words, joined.",
        code='def initials(text):\n    return "".join(w[0] for w in text.split())\n',
        bugs=(("w[0]", "w[-1]"), ("w[0]", "w")),
        draw=one_sentence,
    ),
    Template(
        name="has_prefix",
        says="Return True if the text starts with `prefix`.",
        code="def has_prefix(text, prefix):\n    return text.startswith(prefix)\n",
        bugs=(("startswith", "endswith"), ("text.startswith(prefix)", "prefix.startswith(text)")),
        draw=_maybe_prefix,
    ),
    Template(
        name="capitalize",
        says="Return the word with its first letter in upper case.",
        code="def capitalize(word):\n    return word[0].upper() + word[1:]\n",
        bugs=(("upper()", "lower()"), ("word[1:]", "word"), ("word[0].upper() + word[1:]", "word.upper()")),
        draw=one_word,
    ),
    Template(
        name="remove_spaces",
        says="Return the text without spaces.",
        code='def remove_spaces(text):\n    return text.replace(" ", "")\n',
        bugs=(('" ", ""', '" ", "_"'), ('" ", ""', '"", " "')),
        draw=one_sentence,
    ),
    Template(
        name="count_letter",
        says="Return how often `letter` is in the text.",
        code="def count_letter(text, letter):\n    return text.count(letter)\n",
        bugs=((".count", ".find"), ("text.count(letter)", "len(letter)")),
        draw=lambda r: (sentence(r, 1, 2), r.choice("aeinr")),
    ),
    Template(
        name="is_number",
        says="Return True if the text consists of digits.",
        code="def is_number(text):\n    return text.isdigit()\n",
        bugs=(("isdigit", "isalpha"), ("text.isdigit()", "not text.isdigit()")),
        draw=lambda r: (r.choice((str(positive(r)), str(positive(r) * 37), word(r))),),
    ),
    Template(
        name="double_letters",
        says="Return the text with each letter twice.",
        code='def double_letters(text):\n    return "".join(c * 2 for c in text)\n',
        bugs=(("c * 2", "c * 3"), ("c * 2", "c")),
        draw=one_word,
    ),
    Template(
        name="is_longer",
        says="Return True if `a` has more letters than `b`.",
        code="def is_longer(a, b):\n    return len(a) > len(b)\n",
        bugs=((" > ", " < "), ("len(a) > len(b)", "a > b")),
        draw=lambda r: (word(r), word(r)),
    ),
    Template(
        name="strip_spaces",
        says="Remove the spaces at both ends of the text.",
        code="def strip_spaces(text):\n    return text.strip()\n",
        bugs=((".strip", ".lstrip"), ("text.strip()", "text")),
        draw=lambda r: (" " * r.randint(1, 2) + word(r) + " " * r.randint(1, 2),),
    ),
    Template(
        name="snake_case",
        says="Return the text with underscores instead of spaces.",
        code='def snake_case(text):\n    return text.replace(" ", "_")\n',
        bugs=(('" ", "_"', '" ", "-"'), ('" ", "_"', '"_", " "')),
        draw=one_sentence,
    ),
    Template(
        name="extension",
        says="Return the part of the file name after the last dot.",
        code='def extension(filename):\n    return filename.split(".")[-1]\n',
        bugs=(("[-1]", "[0]"), ('"."', '"/"')),
        draw=lambda r: (".".join([*words(r, 1, 2), r.choice(("py", "txt", "tar", "gz", "md"))]),),
    ),
    Template(
        name="is_vowel",
        says="Return True if the letter is a vowel.",
        code='def is_vowel(letter):\n    return letter in "aeiou"\n',
        bugs=((" in ", " not in "), ('"aeiou"', '"xyz"')),
        draw=lambda r: (r.choice("aeioubcdfgh"),),
    ),
    Template(
        name="surround",
        says="Put `mark` before and after the text.",
        code="def surround(text, mark):\n    return mark + text + mark\n",
        bugs=(("mark + text + mark", "mark + text"), ("mark + text + mark", "text + mark + text")),
        draw=lambda r: (word(r), r.choice("*!-_")),
    ),
    Template(
        name="sorted_words",
        says="Return the words of the text in alphabetical order.",
        code="def sorted_words(text):\n    return sorted(text.split())\n",
        bugs=(("sorted(text.split())", "text.split()"), ("text.split()", "text")),
        draw=one_sentence,
    ),
    Template(
        name="split_commas",
        says="Split the text at its commas.",
        code='def split_commas(text):\n    return text.split(",")\n',
        bugs=(('split(",")', "split()"), ('","', '";"')),
        draw=lambda r: (",".join(words(r, 2, 4)),),
    ),
    Template(
        name="is_anagram",
        says="Return True if `a` and `b` have the same letters in any order.",
        code="def is_anagram(a, b):\n    return sorted(a) == sorted(b)\n",
        bugs=(("sorted(a) == sorted(b)", "a == b"), ("==", "!=")),
        draw=_maybe_anagram,
    ),
    Template(
        name="plural",
        says='Return the word if `n` is 1, else the word with "s" added.',
        code='def plural(word, n):\n    return word if n == 1 else word + "s"\n',
        bugs=(("n == 1", "n != 1"), ("n == 1", "n == 0")),
        draw=lambda r: (word(r), r.choice((0, 1, 1, 2, 5))),
    ),
    Template(
        name="same_word",
        says="Return True if `a` and `b` are equal when upper and lower case are ignored.",
        code="def same_word(a, b):\n    return a.lower() == b.lower()\n",
        bugs=(("a.lower() == b.lower()", "a == b"), ("b.lower()", "b.upper()"), ("==", "!=")),
        draw=_maybe_same_letters,
    ),
    Template(
        name="join_words",
        says="Join the words with single spaces.",
        code='def join_words(words):\n    return " ".join(words)\n',
        bugs=(('" "', '""'), ('" "', '","')),
        draw=word_list,
    ),
    Template(
        name="middle_letter",
        says="Return the letter in the middle of the word.",
        code="def middle_letter(word):\n    return word[len(word) // 2]\n",
        bugs=(("len(word) // 2", "0"), ("// 2", "// 3"), ("len(word) // 2", "-1")),
        draw=lambda r: (word(r)[:5],),
    ),
    Template(
        name="without_vowels",
        says="Remove all vowels from the lower-case text.",
        code='def without_vowels(text):\n    return "".join(c for c in text if c not in "aeiou")\n',
        bugs=(("not in", "in"), ('"aeiou"', '"a"')),
        draw=one_word,
    ),
    Template(
        name="repeat_text",
        says="Return the text repeated `n` times.",
        code="def repeat_text(text, n):\n    return text * n\n",
        bugs=(("text * n", "text + str(n)"), ("text * n", "text * 2")),
        draw=lambda r: (word(r), r.randint(1, 4)),
    ),
    Template(
        name="full_name",
        says="Return the first name and the last name with a space between.",
        code='def full_name(first, last):\n    return first + " " + last\n',
        bugs=(('first + " " + last', "first + last"), ('first + " " + last', 'last + " " + first')),
        draw=lambda r: (word(r).capitalize(), word(r).capitalize()),
    ),
)
