"""What is public says what it is, what takes arrays their shape, what takes quantities their unit: read from the source alone."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p for room in ("segspeed", "data_prep") for p in (ROOT / room).rglob("*.py"))
ARRAY = re.compile(r"\b(Tensor|ndarray)\b")
SHAPE = re.compile(r"\([^()]*,[^()]*\)|\b4x4\b|\bany shape\b|\bscalar\b")  # (D, H, W), (B,)
UNITS = {
    "spacing": r"\bmm\b", "tolerances": r"\bmm\b", "tolerance_mm": r"\bmm\b",
    "seconds": r"\bseconds?\b", "timeout": r"\bseconds?\b", "elapsed": r"\bseconds?\b", "budget": r"\b(seconds?|voxels)\b",
    "limit": r"\b(bytes|characters|names)\b", "angles": r"\b(degrees|radians)\b", "degrees": r"\bdegrees\b",
}  # fmt: skip


def public(tree):
    """(name, node) of every function, method and class whose name and holders have no leading underscore."""
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", inner) for name, inner in public(node))


def parameters(node):
    a = node.args
    return [p for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p is not None]


def is_array(annotation):
    if annotation is None:
        return False
    text = ast.unparse(annotation)
    return "Callable" not in text and ARRAY.search(text) is not None


def faults(source):
    """A line for each public name whose docstring is missing, or lacks a shape or a unit."""
    found = []
    for name, node in public(ast.parse(source)):
        text = ast.get_docstring(node)
        if not text:
            found.append(f"{name} (line {node.lineno}) has no docstring")
            continue
        if isinstance(node, ast.ClassDef):
            continue
        arrays = [p.arg for p in parameters(node) if is_array(p.annotation)]
        if arrays and not SHAPE.search(text):
            found.append(f"{name} (line {node.lineno}) does not say the shape of {', '.join(arrays)}")
        for p in parameters(node):
            if p.arg in UNITS and not re.search(UNITS[p.arg], text, re.IGNORECASE):
                found.append(f"{name} (line {node.lineno}) does not say the unit of {p.arg}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings(path):
    found = faults(path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("def f(): pass", "f (line 1) has no docstring"),
        ("class A:\n  'x'\n  def f(self): pass", "A.f (line 3) has no docstring"),
        ("def f(a: np.ndarray): 'Of an array.'", "shape of a"),
        ("def f(*, a: Tensor | None): 'Of it.'", "shape of a"),
        ("def f(seconds): 'For so long.'", "unit of seconds"),
        ("def f(spacing: Triple): 'In voxels.'", "unit of spacing"),
    ],
)
def test_the_rule_can_fail(source, text):
    (found,) = faults(source)
    assert text in found


@pytest.mark.parametrize(
    "source",
    [
        "def _f(): pass",
        "class _A:\n  def f(self): pass",
        "def f(a: Tensor): '``a (B, C)`` doubled.'",
        "def f(spacing): 'mm'",
    ],
)
def test_the_rule_lets_pass(source):
    assert not faults(source)
