"""The packages import one way: worker → model, replay → worker.events, and model nothing of either."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE = {"kafka", "redis", "structlog", "requests", "urllib", "socket", "http", "os", "pathlib", "time", "datetime"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found.add(node.module or "")
    return found


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def tops(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(path)}


def test_the_model_is_pure() -> None:
    for path in files("model"):
        assert not tops(path) & (OUTSIDE | {"worker", "replay"}), path


def test_the_worker_knows_nothing_of_replay() -> None:
    for path in files("worker"):
        assert "replay" not in tops(path), path


def test_replay_knows_only_the_wire_contract_of_the_worker() -> None:
    for path in files("replay"):
        ours = {m for m in imports(path) if m.partition(".")[0] in ("worker", "model")}
        assert ours <= {"worker.events"}, path


def test_the_loop_can_be_read_in_a_minute_and_no_function_needs_scrolling() -> None:
    for package in ("model", "worker", "replay"):
        for path in files(package):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    assert (node.end_lineno or 0) - node.lineno < 50, f"{path}: {node.name}"
    assert len((ROOT / "worker" / "loop.py").read_text().splitlines()) < 150
