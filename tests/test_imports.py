"""The import directions of docs/design.md, read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardfit
from shardfit.rules import _TABLE, RULES

SRC = Path(shardfit.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
CHECKERS = ("parity", "source", "doctor", "estimate", "cli")


def module_name(file):
    parts = ("shardfit", *file.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree):
    """Full names of all that a tree imports, within functions and TYPE_CHECKING too."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def dotted(node):
    """`a.b.c` of an expression, None where it isn't one."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def private_uses(tree):
    """Names of torch with a part that begins with an underscore: imported, or reached through an import."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                aliases[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    names = imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            head, _, rest = name.partition(".")
            names.append(f"{aliases.get(head, '')}.{rest}")
    return {
        name
        for name in names
        if name.split(".")[0] == "torch"
        and any(part.startswith("_") and not part.startswith("__") for part in name.split(".")[1:])
    }


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo", {"torch._dynamo"}),
        ("from torch.utils._pytree import tree_map", {"torch.utils._pytree.tree_map"}),
        ("from torch.distributed import _shard", {"torch.distributed._shard"}),
        ("import torch\ntorch._foreach_norm(x)", {"torch._foreach_norm"}),
        ("import torch as t\nt.nn.modules._x.y", {"torch.nn.modules._x", "torch.nn.modules._x.y"}),
        ("import torch.distributed as dist\ndist._make()", {"torch.distributed._make"}),
        ("import torch\ntorch.__version__\nself._x.torch\nmodel._parameters", set()),
    ],
)
def test_private_uses_are_seen(source, found):
    assert private_uses(ast.parse(source)) == found


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_import_direction(file):
    name = module_name(file)
    tree = ast.parse(file.read_text())
    ours = [found for found in imports(tree) if found.split(".")[0] == "shardfit"]
    others = {found.split(".")[0] for found in imports(tree)} - {"shardfit"} - sys.stdlib_module_names
    part = name.split(".")[1] if "." in name else ""
    if part in ("findings", "errors", "rules", "plan"):
        assert not others
        assert all(
            found.split(".")[1] in ("findings", "errors", "rules", "plan", "__version__") for found in ours
        )
    if part in ("train", "checkpoint"):
        assert not [found for found in ours if found.split(".")[1] in CHECKERS]
    if part == "source":
        assert "torch" not in others
    if part != "source":
        assert "libcst" not in others
    if part != "cli" and name != "shardfit.__main__":
        assert not [found for found in ours if found.split(".")[1] == "cli"]
    if part != "_torch":
        assert not private_uses(tree), "private parts of torch belong into _torch.py"


def test_import_loads_only_the_standard_library():
    code = (
        "import sys; before = set(sys.modules); import shardfit; shardfit.Plan; shardfit.Report\n"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before}))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(said.stdout.split())
    assert "shardfit" in loaded
    assert loaded - {"shardfit"} <= set(sys.stdlib_module_names)


def test_every_public_name_resolves():
    missing = [name for name in shardfit.__all__ if not hasattr(shardfit, name)]
    assert not missing
    assert set(shardfit.__all__) <= set(dir(shardfit))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = shardfit.nothing


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse((SRC / "__init__.py").read_text())
    typed = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardfit."):
            typed |= {alias.name: node.module for alias in node.names}
    assert typed == shardfit._HOME_OF


def test_codes_in_the_source_are_in_the_catalogue():
    used = {code for file in FILES for code in re.findall(r"\bSF\d{3}\b", file.read_text())}
    assert len(used) > 20
    assert not used - RULES.keys()


def test_the_catalogue_is_sorted_and_unique():
    codes = [rule.code for rule in _TABLE]
    assert codes == sorted(set(codes))
    assert len({rule.name for rule in _TABLE}) == len(_TABLE)
    for rule in _TABLE:
        assert re.fullmatch(r"SF[1-8]\d\d", rule.code)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
        assert rule.severity in ("error", "warning", "note")
        assert rule.summary
        assert rule.fix.endswith(".")
