"""YAML as this project reads and writes it: safe, without aliases, and with numbers as people write them."""

from __future__ import annotations

import re
from typing import Any

import yaml

# YAML 1.1 wants a dot in the mantissa and a sign in the exponent, so it reads 1e-5 as text; and it reads 010
# as 8 and 1:30 as 90, which are text here.
SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")
DECIMAL = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$")
WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)$")
INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class BadYaml(ValueError):
    """The text is not YAML that this project reads; the message says why and, where known, on which line."""


class Loader(yaml.SafeLoader):
    """Refuses what hides mistakes in settings: the same key twice, and values that stand elsewhere."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"the key {key.value!r} stands here twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back as the same value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In double quotes a line break is written \\n, so that every value stays on one line.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (INT, FLOAT)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
NUMERALS = list("-+.0123456789")
Loader.add_implicit_resolver(INT, WHOLE, NUMERALS)
Loader.add_implicit_resolver(FLOAT, DECIMAL, NUMERALS)
for cls in (Loader, Dumper):
    cls.add_implicit_resolver(FLOAT, SCIENTIFIC, NUMERALS)
Dumper.add_representer(str, represent_text)


def parse_yaml(text: str) -> Any:
    """Read one YAML document; raise `BadYaml` where that is impossible."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadYaml(f"{line}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        raise BadYaml(f"line {line_number}: unprintable character {error.character!r}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that cannot exist
        raise BadYaml(str(error).splitlines()[0]) from None
    except RecursionError:
        raise BadYaml("the brackets are nested too deeply") from None


def write_yaml(value: Any) -> str:
    """Write a value on one line."""
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
