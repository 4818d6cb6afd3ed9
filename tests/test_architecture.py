"""The architecture is a test: layers, sizes and habits fail the build, not the review."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

import groupwise
from groupwise.config import Config

LAYERS = [
    *(
        "errors",
        "records",
        "files",
        "invariants",
        "config",
        "tracking",
        "isolation",
        "rewards",
        "retrieval",
        "model",
    ),
    *(
        "parallel",
        "engine",
        "algo",
        "rollout",
        "tasks",
        "learner",
        "evaluate",
        "report",
        "serve",
        "training",
        "evolution",
    ),
    *("gym", "run_result", "commands", "cli", "__init__", "__main__"),
]
"""Low to high: a module imports only from layers before its own."""
KNOWS_NOTHING_OF = {
    "algo": {"config", "model", "engine", "tasks"},
    "rollout": {"engine", "model"},
    "engine": {"tasks", "rewards", "algo"},
    "learner": {"tasks", "rewards", "rollout"},
    "retrieval": {"model", "engine"},
    "rewards": {"tasks", "rollout"},
    "report": {"model", "engine", "learner", "training"},
    "evaluate": {"training"},
    "serve": {"training", "learner"},
    "engine/engine": {"engine/cuda"},
    "engine/cpu_runner": {"engine/cuda"},
}
"""What docs/design.md says that a layer does not know; of a module, lazy imports are allowed."""
WITHOUT_TORCH = {
    *(
        "errors",
        "records",
        "files",
        "config",
        "tracking",
        "isolation",
        "rewards",
        "tasks",
        "commands",
        "cli",
    ),
    *("run_result", "__init__", "__main__"),
}
"""They answer `--help`, `groupwise tasks` and every mistake in the settings."""
MAY_PRINT = {"tracking", "commands", "cli"}

ROOT = Path(str(groupwise.__file__)).parent
MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
every_module = pytest.mark.parametrize("module", MODULES)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def layer(module: str) -> str:
    return module.partition("/")[0].removesuffix(".py")


def imported(module: str, nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the full dotted name of everything imported, `from a import b` as a.b."""
    package = ("groupwise", *Path(module).parts[:-1])
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                origin = ".".join((*base, *([node.module] if node.module else [])))
                yield from ((node.lineno, f"{origin}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: no functions, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                continue
            case ast.If(
                test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=other
            ):
                for statement in other:
                    yield from (statement, *at_import(statement))
            case _:
                yield child
                yield from at_import(child)


def calls(module: str, name: str) -> list[ast.Call]:
    found = (node for node in ast.walk(tree(module)) if isinstance(node, ast.Call))
    return [call for call in found if isinstance(call.func, ast.Name) and call.func.id == name]


@every_module
def test_a_module_belongs_to_a_layer(module):
    assert layer(module) in LAYERS


@every_module
def test_imports_point_down(module):
    own = LAYERS.index(layer(module))
    for line, name in imported(module, ast.walk(tree(module))):
        package, _, rest = name.partition(".")
        if package == "groupwise":
            target = rest.partition(".")[0]
            # A name that is not a layer comes out of groupwise/__init__, the highest but one.
            target = target if target in LAYERS else "__init__"
            assert target == layer(module) or LAYERS.index(target) < own, (
                f"{module}:{line} imports upward: {name}"
            )


@every_module
def test_the_light_layers_import_no_torch(module):
    if layer(module) in WITHOUT_TORCH:
        names = {name.partition(".")[0] for _, name in imported(module, at_import(tree(module)))}
        assert not names & {"torch", "transformers", "peft", "accelerate", "datasets"}


def edges() -> dict[str, set[str]]:
    """Return what each module imports of this package, lazy imports counted, types alone not."""
    names = {
        module.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): module for module in MODULES
    }
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        for_types = {
            id(node)
            for branch in ast.walk(tree(module))
            if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
            for node in ast.walk(branch)
        }
        nodes = (node for node in ast.walk(tree(module)) if id(node) not in for_types)
        targets = (name.removeprefix("groupwise.") for _, name in imported(module, nodes))
        found = {names.get(name) or names.get(name.rpartition(".")[0]) for name in targets}
        graph[module] = {other for other in found if other is not None} - {module}
    return graph


def test_no_modules_import_each_other_in_a_circle():
    # A package's __init__ only re-exports, and its modules may be imported through it from outside.
    graph = {module: {t for t in to if not t.endswith("__init__.py")} for module, to in edges().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' → '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("part", KNOWS_NOTHING_OF)
def test_a_layer_does_not_know_what_the_design_says_it_does_not_know(part):
    unknown = KNOWS_NOTHING_OF[part]
    for module in MODULES:
        own = module.removesuffix(".py")
        if own == part or own.startswith(f"{part}/"):
            nodes = at_import(tree(module)) if "/" in part else ast.walk(tree(module))
            for line, name in imported(module, nodes):
                path = name.removeprefix("groupwise.").replace(".", "/")
                broken = [other for other in unknown if path == other or path.startswith(f"{other}/")]
                assert broken == [], f"{module}:{line} imports {name}"


def test_a_folder_has_at_most_12_modules():
    folders = Counter(Path(module).parent for module in MODULES if not module.endswith("__init__.py"))
    assert {str(folder): count for folder, count in folders.items() if count > 12} == {}


def test_a_module_name_is_used_once_and_is_not_a_name_of_the_standard_library():
    names = Counter(Path(module).stem for module in MODULES)
    del names["__init__"], names["__main__"]
    assert [name for name, count in names.items() if count > 1] == []
    assert set(names) & set(sys.stdlib_module_names) == set()


def test_a_class_name_is_used_once():
    names = Counter(n.name for module in MODULES for n in tree(module).body if isinstance(n, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("package", [module for module in MODULES if module.endswith("/__init__.py")])
def test_a_package_opens_with_a_map_of_its_modules(package):
    folder = Path(package).parent
    named = ast.get_docstring(tree(package)) or ""
    modules = [Path(module).stem for module in MODULES if Path(module).parent == folder and module != package]
    assert [name for name in modules if not re.search(rf"\b{name}\b", named)] == []


SHORT = {
    "__main__",
    "tracking/number_format",
}
"""Leaves and plug points that are one idea in fewer than 60 lines."""


def test_a_module_is_worth_a_file():
    lines = {
        module.removesuffix(".py"): len(path.read_text().splitlines()) for module, path in MODULES.items()
    }
    short = {name for name, count in lines.items() if count < 60 and not name.endswith("__init__")}
    assert short == SHORT


@every_module
def test_a_constant_is_defined_once(module):
    """The second definition would change what the functions before it read."""
    targets = [target for n in tree(module).body if isinstance(n, ast.Assign) for target in n.targets]
    names = Counter(target.id for target in targets if isinstance(target, ast.Name))
    assert [name for name, count in names.items() if count > 1] == []


@every_module
def test_a_module_has_at_most_500_lines(module):
    assert len(MODULES[module].read_text(encoding="utf-8").splitlines()) <= 500


@every_module
def test_a_function_has_at_most_60_lines(module):
    functions = [node for node in ast.walk(tree(module)) if isinstance(node, Function)]
    # The signature of a command declares its options and their help: only the body counts.
    lengths = {node.name: (node.end_lineno or 0) - node.body[0].lineno + 1 for node in functions}
    assert {name: length for name, length in lengths.items() if length > 60} == {}


@every_module
def test_a_module_is_named_after_its_idea(module):
    assert not set(Path(module).with_suffix("").parts) & {
        "utils",
        "util",
        "helpers",
        "helper",
        "common",
        "misc",
    }


@every_module
def test_only_the_outer_layers_print(module):
    if layer(module) not in MAY_PRINT:
        assert [call.lineno for call in calls(module, "print")] == []


@every_module
def test_zip_says_whether_lengths_must_agree(module):
    silent = [
        c.lineno for c in calls(module, "zip") if "strict" not in {keyword.arg for keyword in c.keywords}
    ]
    assert silent == []


MAKERS = {"from_pretrained", "from_config"}
"""What of transformers' Auto classes asks on standard input whether to run a model's own code."""


@every_module
def test_no_model_is_loaded_with_code_of_its_own(module):
    made = [
        node
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MAKERS
        and (last_name(node.func.value) or "").startswith("Auto")
    ]
    refused = [
        node
        for node in made
        if any(
            keyword.arg == "trust_remote_code"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
            for keyword in node.keywords
        )
    ]
    assert [node.lineno for node in made] == [node.lineno for node in refused]


# Every setting is live: something outside config reads it.

SECTIONS = get_type_hints(Config)
SETTINGS = [f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in fields(cls)]
SECTION_OF_CLASS = {cls.__name__: section for section, cls in SECTIONS.items()}
OBJECTS = {"model", "task", "run", "engine", "rollout", "tools"}
"""Sections whose name, as a plain variable, more likely is the model, task or run itself."""


def derived() -> dict[str, set[str]]:
    """Return what each property of a section reads: "optim.updates" -> {"optim.epochs", …}."""
    reads: dict[str, set[str]] = {}
    modules = ("config/schema.py", "config/runtime.py")
    for node in (node for module in modules for node in tree(module).body):
        if isinstance(node, ast.ClassDef) and node.name in SECTION_OF_CLASS:
            section = SECTION_OF_CLASS[node.name]
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and not function.name.startswith("__"):
                    attributes = (sub for sub in ast.walk(function) if isinstance(sub, ast.Attribute))
                    own = {
                        sub.attr
                        for sub in attributes
                        if isinstance(sub.value, ast.Name) and sub.value.id == "self"
                    }
                    reads[f"{section}.{function.name}"] = {f"{section}.{key}" for key in own}
    return reads


def last_name(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def section_variables(module: str) -> dict[str, str]:
    """Return the names that hold a section in this module: annotated as one, or assigned from `….section`."""
    holders = {section: section for section in SECTIONS if section not in OBJECTS}
    for node in ast.walk(tree(module)):
        match node:
            case (
                ast.arg(arg=name, annotation=kind) | ast.AnnAssign(target=ast.Name(id=name), annotation=kind)
            ):
                if (section := SECTION_OF_CLASS.get(last_name(kind) or "")) is not None:
                    holders[name] = section
            case ast.Assign(targets=[target], value=ast.Attribute(attr=section)) if section in SECTIONS:
                if (name := last_name(target)) is not None:
                    holders[name] = section
    return holders


def reads(module: str) -> Iterator[str]:
    """Yield the settings, or properties of sections, that the module reads."""
    holders = section_variables(module)
    for node in ast.walk(tree(module)):
        match node:
            case ast.Attribute(value=ast.Attribute(attr=section), attr=key) if section in SECTIONS:
                yield f"{section}.{key}"
            case ast.Attribute(value=ast.Name() | ast.Attribute() as holder, attr=key):
                if (section := holders.get(last_name(holder) or "")) is not None:
                    yield f"{section}.{key}"


@cache
def live() -> frozenset[str]:
    names = {name for module in MODULES if layer(module) != "config" for name in reads(module)}
    through_properties = derived()
    return frozenset(names.union(*(through_properties.get(name, set()) for name in names)))


READ_IN_CONFIG = {"lora.preset"}
"""Stand for other settings, and are replaced by them while a configuration is read."""


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name not in READ_IN_CONFIG])
def test_every_setting_is_read_somewhere(setting):
    if setting not in live():
        pytest.fail(f"nothing outside config reads {setting}", pytrace=False)


HEAVY_OR_OPTIONAL = (
    *("starlette", "uvicorn", "matplotlib", "datasets", "trackio", "wandb", "bitsandbytes", "math_verify"),
    *(
        "chromadb",
        "sentence_transformers",
        "trafilatura",
        "httpx",
        "deepspeed",
        "gymnasium",
        "openai",
        "vllm",
    ),
)
"""Only the commands that use one of these need it: training runs without them."""


def test_training_imports_nothing_that_only_other_commands_need():
    program = f"""
import subprocess
import sys
for name in {HEAVY_OR_OPTIONAL}:
    sys.modules[name] = None  # importing it raises
import groupwise.training.loop, groupwise.training.sft_run, groupwise.evolution.evolve_run
import groupwise.gym.agent, groupwise.commands.eval, groupwise.commands.chat
print("imported")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr


# The tests follow the source.

TESTS = Path(__file__).parent
TEST_FILES = {path.relative_to(TESTS).as_posix(): path for path in sorted(TESTS.rglob("test_*.py"))}
NOT_MIRRORED = {"support", "gpu"}
"""Folders of tests without a folder of the same name in the source."""


def test_a_folder_of_tests_has_the_name_of_a_package():
    folders = {Path(name).parent for name in TEST_FILES if Path(name).parts[0] not in NOT_MIRRORED}
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []


def test_a_folder_of_tests_has_at_most_15_files():
    folders = Counter(Path(name).parent for name in TEST_FILES)
    assert {str(folder): count for folder, count in folders.items() if count > 15} == {}


def test_no_test_module_imports_another():
    names = {path.stem for path in TEST_FILES.values()}
    for file, path in TEST_FILES.items():
        for line, name in imported(file, ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
            assert not names & set(name.split(".")[:-1]), f"{file}:{line} imports {name}"


def test_files_that_are_listed_as_slow_exist():
    listed = ast.parse((TESTS / "conftest.py").read_text(encoding="utf-8"))
    slow = next(
        ast.literal_eval(node.value)
        for node in listed.body
        if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "SLOW_FILES"
    )
    assert [name for name in slow if name not in TEST_FILES] == []
