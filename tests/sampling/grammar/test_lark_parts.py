"""Grammars in Lark's syntax are taken apart into what an answer may reach."""

from __future__ import annotations

from radixkv.sampling.grammar.lark_parts import numbered_parts

GRAMMAR = r"""
// a /comment/: "of one line"
start: "text /not/ a part" word? %json {"pattern": "/x/"}
  | /re\/gex/i NUMBER
?word: /[a-z]+/ | start
NUMBER.2: DIGIT+ # another /comment/
DIGIT: /[0-9]/
limited[max_tokens=3]: /[a-z]+/
"""


def test_every_rule_and_regular_expression_follows_a_number() -> None:
    grammar, numbers = numbered_parts(GRAMMAR)
    start, others = grammar.split("\n", 1)
    assert (
        start
        == r'start: "00" /re\/gex/i | "01" word | "02" /[a-z]+/ | "03" NUMBER | "04" DIGIT | "05" /[0-9]/ | "06" limited'
    )
    assert numbers == ["00", "01", "02", "03", "04", "05", "06"]
    assert others == GRAMMAR.replace("start: ", "whole_answer: ")


def test_of_many_rules_the_first_are_tried() -> None:
    _, numbers = numbered_parts("start: A0\n" + "".join(f'A{number}: "a"\n' for number in range(500)))
    assert len(numbers) == 64


def test_a_grammar_of_one_string_has_no_parts() -> None:
    assert numbered_parts('start: "a"\n')[1] == []
