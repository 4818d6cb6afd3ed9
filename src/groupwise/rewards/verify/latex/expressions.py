"""Parse tokens into expression trees by recursive descent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import Any

from groupwise.rewards.verify.latex.latex_lexer import LatexToken, Malformed, Unfamiliar
from groupwise.rewards.verify.vocabulary import UNITS


class TokenCursor:
    """A position in a list of tokens: peek at the next token and consume it if it matches."""

    def __init__(self, tokens: list[LatexToken]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.seen_words: list[str] = []
        """Words and units consumed so far."""
        self.either_sign = False
        """Whether a ± was consumed."""

    @property
    def next(self) -> LatexToken | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def sees(self, *texts: str) -> bool:
        if self.position == len(self.tokens):
            return False
        token = self.tokens[self.position]
        return token.text in texts and token.kind != "words"

    def take(self, *texts: str) -> str | None:
        if self.position == len(self.tokens):  # `sees` again, without the call: most time is spent here
            return None
        token = self.tokens[self.position]
        if token.text not in texts or token.kind == "words":
            return None
        self.position += 1
        return token.text

    def need(self, text: str) -> None:
        if not self.take(text):
            raise Malformed(f"missing {text!r}")


MAX_DEPTH = 60
"""Nesting limit of sums and atoms; brackets count twice."""

Node = tuple[Any, ...]
"""An expression tree: ("number", Fraction), ("name", "x"), ("+", a, b), ("root", degree, a) …"""

GREEK = frozenset(
    """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell
    """.split()  # noqa: SIM905
)
FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp arcsin arccos arctan".split())  # noqa: SIM905
TIMES = frozenset(("*", r"\cdot", r"\times", r"\ast"))
FACTOR_COMMANDS = frozenset(
    (
        r"\frac", r"\sqrt", r"\binom", r"\dbinom", r"\tbinom", r"\pi", r"\infty", r"\{", r"\langle",
        r"\lvert", r"\begin",
    )
)  # fmt: skip
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "≤", ">=": "≥", "!=": "≠", r"\le": "≤", r"\leq": "≤",
    r"\leqslant": "≤", r"\lt": "<", r"\gt": ">", r"\ge": "≥", r"\geq": "≥", r"\geqslant": "≥", r"\ne": "≠",
    r"\neq": "≠", r"\in": "∈", ":": ":", r"\approx": "≈", r"\mid": ":", r"\colon": ":",
}  # fmt: skip
CLOSES = {"(": ")", "[": "]", r"\{": r"\}", "{": "}", r"\langle": r"\rangle", r"\lbrace": r"\rbrace"}


class Expressions(TokenCursor, ABC):
    """Recursive descent parser, limited to MAX_DEPTH. Subclasses parse the content of brackets."""

    @abstractmethod
    def chain(self) -> Node:
        """Parse expressions with relations between them."""

    @abstractmethod
    def group(self, opening: str) -> Node:
        """Parse the content of brackets and the closing one, after the opening one."""

    @abstractmethod
    def matrix(self) -> Node:
        r"""Parse what follows a `\begin`."""

    def words(self) -> None:
        """Consume and record the words and units at this position: `square cm^2`."""
        while self.next is not None and self.next.kind == "words":
            self.seen_words.append(self.next.text)
            self.position += 1
            if self.take("^"):
                power = int_of(self.argument())
                self.seen_words.append({2: "square", 3: "cubic"}.get(power or 0, "power"))
            self.per_unit()

    def per_unit(self) -> None:
        """Consume the `/h` of `km/h`."""
        ahead = self.tokens[self.position : self.position + 2]
        if len(ahead) == 2 and ahead[0].text in ("/", r"\cdot") and ahead[1].kind == "letter":
            if ahead[1].text in UNITS:
                self.seen_words.append(ahead[1].text)
                self.position += 2
        elif len(ahead) == 2 and ahead[0].text == "/" and ahead[1].kind == "words":
            self.position += 1

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Malformed("nested too deep")
        sign = self.take("+", "-", r"\pm")
        node = self.term()
        if sign == "-":
            node = ("negative", node)
        elif sign == r"\pm":
            node = self.plus_minus(("number", Fraction(0)), node)
        while operator := self.take("+", "-", r"\pm"):
            right = self.term()
            node = self.plus_minus(node, right) if operator == r"\pm" else (operator, node, right)
        self.depth -= 1
        return node

    def plus_minus(self, left: Node, right: Node) -> Node:
        self.either_sign = True
        return ("±", left, right)

    def term(self) -> Node:
        node = self.power()
        while True:
            if self.take(*TIMES):
                node = ("*", node, self.signed_power())
            elif self.take("/", r"\div"):
                node = ("/", node, self.signed_power())
            elif self.starts_factor():
                node = self.product(node)
            else:
                return node

    def product(self, left: Node) -> Node:
        """Multiply two adjacent factors; an integer and a proper fraction are a mixed number."""
        before, first = self.tokens[self.position - 1], self.tokens[self.position]
        if first.kind == "number":
            if before.kind == "number" and (mixed := self.spelled_mixed(left)) is not None:
                return mixed
            raise Malformed("a number directly after another factor")
        if first.text == "{" and [token.kind for token in self.tokens[self.position + 1 :][:1]] == ["number"]:
            raise Malformed("braces are invisible: `{5}{6}` renders as 56")
        right = self.power()
        if before.kind == "number" and left[0] == "number" and first.text == r"\frac" and is_proper(right):
            return ("mixed", left, right)
        return ("*", left, right)

    def spelled_mixed(self, whole: Node) -> Node | None:
        """Parse `2 1/3`."""
        ahead = self.tokens[self.position : self.position + 3]
        if whole[0] != "number" or [token.text for token in ahead[1:2]] != ["/"] or len(ahead) < 3:
            return None
        above, below = ahead[0].text, ahead[2].text
        if not (above.isdigit() and below.isdigit() and 0 < int(above) < int(below)):
            return None
        self.position += 3
        return ("mixed", whole, ("/", ("number", Fraction(int(above))), ("number", Fraction(int(below)))))

    def starts_factor(self) -> bool:
        token = self.next
        if token is None or token.kind in ("words", "separator"):
            return False
        if token.kind in ("number", "letter"):
            return True
        if token.kind == "symbol":
            return token.text in "([{"
        name = token.text[1:]
        return name in GREEK or name in FUNCTIONS or token.text in FACTOR_COMMANDS

    def signed_power(self) -> Node:
        if self.take("-"):
            return ("negative", self.power())
        self.take("+")
        return self.power()

    def power(self) -> Node:
        node = self.atom()
        raised = False
        while True:
            if self.take("^", "**"):
                if self.take(r"\circ") or self.takes_degree():
                    node = ("degrees", node)
                elif raised:
                    raise Malformed("a power of a power needs braces")
                else:
                    node, raised = ("^", node, self.exponent()), True
            elif self.take("%"):
                if node[0] == "percent":
                    raise Malformed("two percent signs")
                node = ("percent", node)
            elif self.take("!"):
                if node[0] == "factorial":
                    raise Malformed("two factorial signs")
                node = ("factorial", node)
            elif self.take(r"\circ", r"\degree"):
                node = ("degrees", node)
            elif node[0] == "name" and self.take("'"):
                node = ("name", f"{node[1]}'")
            else:
                return node

    def takes_degree(self) -> bool:
        """Consume `{\\circ}`."""
        texts = [token.text for token in self.tokens[self.position : self.position + 3]]
        if texts != ["{", r"\circ", "}"]:
            return False
        self.position += 3
        return True

    def exponent(self) -> Node:
        negative = self.take("-")
        is_number = self.next is not None and self.next.kind == "number"
        node = self.number() if is_number else self.argument()
        return ("negative", node) if negative else node

    def number(self) -> Node:
        token = self.tokens[self.position]
        self.position += 1
        return ("number", Fraction(token.text))

    def argument(self) -> Node:
        """Parse the argument of a command: a group in braces, or one character."""
        token = self.next
        if token is None:
            raise Malformed("missing argument")
        if self.take("{"):
            return self.until("}")
        if token.kind == "number" and len(token.text) > 1:
            # `\frac12` is 1/2: take one digit and leave the rest.
            self.tokens[self.position] = LatexToken("number", token.text[1:], True)
            if not token.text[0].isdigit() or token.text[1] == ".":
                raise Malformed("a decimal needs braces here")
            return ("number", Fraction(int(token.text[0])))
        return self.atom()

    def until(self, close: str) -> Node:
        node = self.chain()
        self.words()
        self.need(close)
        return node

    def atom(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Malformed("nested too deep")
        node = self.one_atom()
        self.depth -= 1
        return node

    def one_atom(self) -> Node:
        token = self.next
        if token is None:
            raise Malformed("unexpected end")
        if token.kind == "number":
            node = self.number()
            return self.based(token.text) if self.take("_") else node
        self.position += 1
        if token.kind == "letter":
            return self.named(token.text)
        if token.text in CLOSES:
            return self.group(token.text)
        if token.text == "|":
            node = self.sum()
            self.need("|")
            return ("absolute", node)
        if token.kind == "command":
            if token.text in RELATIONS:
                raise Malformed("a relation without a left side")
            return self.command(token.text)
        raise Malformed(f"unexpected {token.text!r}")

    def based(self, digits: str) -> Node:
        base = self.exponent()
        value = int_of(base)
        if value is None or not digits.isdigit():
            raise Malformed("a base must be an integer")
        return ("based", digits, value)

    def named(self, name: str) -> Node:
        constants: dict[str, Node] = {"e": ("constant", "e"), "i": ("constant", "i")}
        if self.take("_"):
            index = self.argument()
            return ("name", f"{name}_{index[1] if len(index) == 2 else index}")
        return constants.get(name, ("name", name))

    def command(self, command: str) -> Node:
        match command:
            case r"\frac":
                return ("/", self.argument(), self.argument())
            case r"\sqrt":
                degree: Node = ("number", Fraction(2))
                if self.take("["):
                    degree = self.until("]")
                return ("root", degree, self.argument())
            case r"\binom" | r"\dbinom" | r"\tbinom":
                return ("choose", self.argument(), self.argument())
            case r"\pi":
                return ("constant", "pi")
            case r"\infty":
                return ("infinity",)
            case r"\emptyset" | r"\varnothing":
                return ("set",)
            case r"\begin":
                return self.matrix()
            case r"\lvert" | r"\vert":
                node = self.sum()
                if not self.take(r"\rvert", r"\vert"):
                    raise Malformed("missing |")
                return ("absolute", node)
        name = command[1:]
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self.named(name)
        if len(name) == 1 and not name.isalpha():
            raise Malformed(f"unexpected {command!r}")
        raise Unfamiliar(command)

    def function(self, name: str) -> Node:
        r"""Parse `\sin^2 5x` or `\log_2(8)`. The argument ends before the next sum, relation or function."""
        base = self.exponent() if name == "log" and self.take("_") else None
        power = self.exponent() if self.take("^") else None
        if power == ("negative", ("number", 1)) and f"arc{name}" in FUNCTIONS:
            name, power = f"arc{name}", None  # `\sin^{-1}` is the inverse function
        if self.sees("(", "{", "["):
            argument = self.atom()
            if self.sees("^"):
                argument = self.power_of(argument)
        else:
            argument = self.signed_power()
            while self.starts_factor() and not self.sees(*(f"\\{other}" for other in FUNCTIONS)):
                argument = self.product(argument)
            if self.sees("/") and not self.function_follows():
                self.position += 1
                argument = ("/", argument, self.power())
        node: Node = ("function", name, argument, base)
        return ("^", node, power) if power is not None else node

    def function_follows(self) -> bool:
        r"""Return whether a function follows the next token: `\ln 2/\ln 3` is a quotient of two."""
        ahead = self.tokens[self.position + 1 : self.position + 2]
        return bool(ahead) and ahead[0].text[1:] in FUNCTIONS

    def power_of(self, argument: Node) -> Node:
        r"""Attach a degree sign to the argument, and no other power: `\sin(30)^\circ`."""
        if [token.text for token in self.tokens[self.position : self.position + 2]] == ["^", r"\circ"]:
            self.position += 2
            return ("degrees", argument)
        return argument


def is_proper(node: Node) -> bool:
    """Return whether this is a fraction of integers between 0 and 1, as in a mixed number."""
    if node[0] != "/":
        return False
    above, below = int_of(node[1]), int_of(node[2])
    return above is not None and below is not None and 0 < above < below


def int_of(node: Node) -> int | None:
    if node[0] == "number" and node[1].denominator == 1:
        return int(node[1])
    return None
